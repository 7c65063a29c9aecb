# $1: the part. $2: how many bytes of it are there. Standard input: the rest. After path.sh.
# shellcheck disable=SC2154
if [ "$2" = 0 ]; then : >"$p" || exit 1; fi
[ "$(wc -c <"$p")" -eq "$2" ] || fail "another upload has changed it"
exec cat >>"$p"
