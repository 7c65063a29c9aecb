# $1: the log. $2: how many lines.
# shellcheck disable=SC2154
test -f "$p" || exit 66
if test -f "$p.1" && [ "$(tail -n "$2" "$p" | wc -l)" -lt "$2" ]; then
    cat "$p.1" "$p" | tail -n "$2"
    exit
fi
exec tail -n "$2" "$p"
