# What a release and its environment hold. $1: the release's folder. $2: the environment's. Changes nothing.
# shellcheck disable=SC2086,SC2154

cd "$1" || exit 1
find . -name __pycache__ -prune -o -type f -exec $sum {} + | sed "s,^\([0-9a-f]*\)  \./,file$tab\1$tab,"
for name in hosts.toml list/hosts.toml service/*; do
    if test -f "$name"; then setting=$name awk '{ print "text\t" ENVIRON["setting"] "\t" $0 }' "$name"; fi
done
for folder in "$2"/lib/python*/site-packages/*.dist-info; do
    if test -d "$folder"; then emit package "$(basename "$folder" .dist-info)"; fi
done
emit end
