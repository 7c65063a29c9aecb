# $@: paths. Prints the KiB of each, in this order; an empty line if that cannot be measured.
for path in "$@"; do
    du -sk "$path" 2>/dev/null | awk 'NR == 1 { kib = $1 } END { print kib }'
done
