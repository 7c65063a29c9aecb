# The folder of $p, which is created, and a name beside it, $t, for what is not complete yet.
# shellcheck disable=SC2034,SC2154
d=${p%/*}
b=${p##*/}
[ -d "${d:-/}" ] || mkdir -p "$d" || exit 1
t=$d/.$b.part.$$
