# Removes $1, an environment or a model that hosts share, unless a command that may need it has begun. It is moved away
# before the look: a command that begins later finds it missing. $2: the folder of all hosts. $3...: hosts whose locks
# this command holds.
path=$1 away=$1.removed hosts=$2
shift 2
case $path in *.removed) exec rm -rf "$path" ;; esac
reason() { # why it stays, nothing if it goes
    for lock in "$hosts"/*/lock; do
        host=${lock%/lock} && host=${host##*/}
        case " $* " in *" $host "*) continue ;; esac
        if test -d "$lock"; then echo "a command changes $host and may need it"; return; fi
    done
    name=${path##*/} model=/models/carried/${path##*/}
    if grep -qxF "$name" "$hosts"/*/releases/*/environment 2>/dev/null ||
        grep -qF -e "$model'" -e "$model\"" "$hosts"/*/releases/*/hosts.toml 2>/dev/null; then
        echo "a release needs it"
    fi
}
test -e "$path" || exit 0
rm -rf "$away" || exit 1
trap '' HUP INT TERM # the look is short, and it must not stay away if a release needs it
mv "$path" "$away" || exit 1
why=$(reason "$@")
if [ -z "$why" ]; then
    trap - HUP INT TERM
    exec rm -rf "$away"
fi
if test -e "$path"; then rm -rf "$away"; else mv "$away" "$path"; fi
printf '%s\n' "$path stays: $why" >&2
exit 1
