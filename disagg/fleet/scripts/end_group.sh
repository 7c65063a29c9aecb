# $1: a process group that no service manager controls.
kill -s TERM -- "-$1" 2>/dev/null || exit 0
n=0
while kill -0 "$1" 2>/dev/null; do
    n=$((n + 1))
    if [ $n -eq 150 ]; then kill -s KILL -- "-$1" 2>/dev/null; fi
    if [ $n -gt 175 ]; then echo "process $1 survives SIGKILL" >&2; exit 1; fi
    sleep 0.2
done
