# $1: the log. $2: how many lines to start with. $3: "wait" for a log that does not exist yet, else exit 66.
# -F: also a log that is created later or rotated.
# shellcheck disable=SC2154
test -f "$p" || test "$3" = wait || exit 66
exec tail -n "$2" -F "$p" 2>/dev/null
