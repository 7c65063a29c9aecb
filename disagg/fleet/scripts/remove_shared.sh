# Removes $1, an environment or a model that hosts share, unless a release needs it by now, or a command changes another
# host and may need it. $2: the folder of all hosts. $3...: hosts whose locks this command holds.
path=$1 hosts=$2
shift 2
case $path in *.removed) exec rm -rf "$path" ;; esac
trap '' HUP INT TERM # until it is moved aside: one that is half removed must not keep its name
stays() { printf '%s\n' "$path stays: $1" >&2; exit 1; }
for lock in "$hosts"/*/lock; do
    host=${lock%/lock} && host=${host##*/}
    case " $* " in *" $host "*) continue ;; esac
    if test -d "$lock"; then stays "a command changes $host and may need it"; fi
done
model=/models/carried/${path##*/}
if grep -qxF "${path##*/}" "$hosts"/*/releases/*/environment 2>/dev/null ||
    grep -qF -e "$model'" -e "$model\"" "$hosts"/*/releases/*/hosts.toml 2>/dev/null; then
    stays "a release needs it"
fi
test -e "$path" || exit 0
rm -rf "$path.removed" && mv "$path" "$path.removed" || exit 1
trap - HUP INT TERM
exec rm -rf "$path.removed"
