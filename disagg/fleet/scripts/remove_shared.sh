# Removes $1, an environment or a model that hosts share, unless a release needs it by now, or a command changes another
# host and may need it. It is moved aside before the look: a command that begins after the look finds it missing. $2: the
# folder of all hosts. $3...: hosts whose locks this command holds.
path=$1 aside=$1.removed hosts=$2
shift 2
case $path in *.removed) exec rm -rf "$path" ;; esac
reason() { # why it stays, nothing if it goes
    for lock in "$hosts"/*/lock; do
        host=${lock%/lock} && host=${host##*/}
        case " $* " in *" $host "*) continue ;; esac
        if test -d "$lock"; then echo "a command changes $host and may need it"; return; fi
    done
    model=/models/carried/${path##*/}
    if grep -qxF "${path##*/}" "$hosts"/*/releases/*/environment 2>/dev/null ||
        grep -qF -e "$model'" -e "$model\"" "$hosts"/*/releases/*/hosts.toml \
            "$hosts"/*/releases/*/list/hosts.toml 2>/dev/null; then
        echo "a release needs it"
    fi
}
test -e "$path" || exit 0
rm -rf "$aside" || exit 1
trap '' HUP INT TERM # it must not stay aside if it is needed, nor keep its name once it is half removed
mv "$path" "$aside" || exit 1
why=$(reason "$@")
if [ -z "$why" ]; then
    trap - HUP INT TERM
    exec rm -rf "$aside"
fi
if test -e "$path"; then rm -rf "$aside"; else mv "$aside" "$path"; fi
printf '%s\n' "$path stays: $why" >&2
exit 1
