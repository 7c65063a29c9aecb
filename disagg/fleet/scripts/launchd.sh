# $1: start, stop, restart or remove. $2: the label of a host's daemon. $3: its file.
if ! sudo -n true 2>/dev/null; then
    echo 'launchd daemons belong to root, and sudo asks for a password here' >&2
    exit 77
fi
gone() { # bootout may return before the daemon has ended: 36, Operation now in progress; 3: not loaded
    output=$(sudo -n launchctl bootout "system/$1" 2>&1) || case $? in
        3 | 36) ;;
        *) printf '%s\n' "$output" >&2; return 1 ;;
    esac
    n=0
    while sudo -n launchctl print "system/$1" >/dev/null 2>&1; do
        n=$((n + 1))
        if [ $n -gt 120 ]; then echo "launchd did not stop $1: $output" >&2; return 1; fi
        sleep 0.5
    done
}
case $1 in
    start)
        sudo -n launchctl print "system/$2" >/dev/null 2>&1 && exec sudo -n launchctl kickstart "system/$2"
        exec sudo -n launchctl bootstrap system "$3"
        ;;
    stop)
        sudo -n launchctl print "system/$2" >/dev/null 2>&1 || exit 0
        gone "$2"
        ;;
    restart)
        sudo -n launchctl print "system/$2" >/dev/null 2>&1 || exec sudo -n launchctl bootstrap system "$3"
        exec sudo -n launchctl kickstart -k "system/$2"
        ;;
    remove)
        for label in "$2" "$2.wired-limit"; do
            if sudo -n launchctl print "system/$label" >/dev/null 2>&1; then gone "$label" || exit 1; fi
            sudo -n rm -f "/Library/LaunchDaemons/$label.plist" || exit 1
        done
        ;;
esac
