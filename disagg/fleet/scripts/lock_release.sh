# $1: the lock. $2: the holder, as JSON. $3: the audit's file, which an uninstall has removed. $4...: lines for it.
lock=$1 holder=$2 file=$3
shift 3
trap '' HUP INT TERM # a part of a lock would be in everybody's way
for line in "$@"; do
    if test -d "${file%/*}"; then audit "$file" "$line"; fi
done
if [ "$(cat "$lock/holder" 2>/dev/null)" = "$holder" ]; then
    mv "$lock" "${lock%/*}/.lock.$$" && rm -rf "${lock%/*}/.lock.$$"
fi
