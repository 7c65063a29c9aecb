# $1: the lock. $2: the holder, as JSON. $3: the audit's file. $4...: lines for it. After audit.sh.
lock=$1 holder=$2
shift 2
trap '' HUP INT TERM # a part of a lock would be in everybody's way
audit "$@"
if [ "$(cat "$lock/holder" 2>/dev/null)" = "$holder" ]; then
    mv "$lock" "${lock%/*}/.lock.$$" && rm -rf "${lock%/*}/.lock.$$"
fi
