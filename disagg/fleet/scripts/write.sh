# $1: the file. $2: its mode in octal, set before the content is written. $3: its size. Standard input: the content.
# After path.sh and beside.sh.
# shellcheck disable=SC2154
[ -d "$p" ] && fail "$p: Is a directory"
trap 'rm -f "$t"' EXIT
trap 'exit 1' HUP INT PIPE TERM
rm -f "$t"
umask 077
exec 3>"$t" || exit 1
chmod "$2" "$t" || exit 1
cat >&3 || exit 1
exec 3>&-
[ "$(wc -c <"$t")" -eq "$3" ] || fail "only a part arrived"
mv -f "$t" "$p"
