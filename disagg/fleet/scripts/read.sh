# $1: the file. $2: how many bytes of its end, at most. After path.sh.
# shellcheck disable=SC2154
exec tail -c "$2" <"$p"
