# $1: start, stop, restart, enable, disable or remove. $2: a unit of this user. $3: its file, for remove.
XDG_RUNTIME_DIR=/run/user/$(id -u)
export XDG_RUNTIME_DIR
case $1 in
    start | restart)
        systemctl --user reset-failed "$2" 2>/dev/null
        ;;
    enable)
        n=0 # a manager that linger has just started may not respond yet
        until systemctl --user show-environment >/dev/null 2>&1; do
            n=$((n + 1))
            if [ $n -gt 50 ]; then break; fi
            sleep 0.2
        done
        systemctl --user daemon-reload || exit
        ;;
    remove)
        systemctl --user disable --now "$2" 2>/dev/null
        rm -f "$3"
        exec systemctl --user daemon-reload
        ;;
esac
exec systemctl --user "$1" "$2"
