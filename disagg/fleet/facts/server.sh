# How one host's server fares, in one round trip: lines of tab-separated fields, first field the kind; "end" comes last.
# $1: the host's name. $2...: the ports that its server uses. Changes nothing. POSIX sh, as of dash and macOS.

LC_ALL=C
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin
export LC_ALL PATH
host=$1
shift
mine=$HOME/.disagg/hosts/$host
tab=$(printf '\t')

say() {
    kind=$1
    shift
    printf '%s' "$kind"
    for field in "$@"; do printf '\t%s' "$(printf '%s' "$field" | tr '\t\n' '  ')"; done
    printf '\n'
}

digest() {
    if command -v sha256sum >/dev/null 2>&1; then sha256sum <"$1"; else shasum -a 256 <"$1"; fi 2>/dev/null | cut -c1-64
}

runs() { # pid, a word of its command line: whether it is still a process of this host, and of no other on the machine
    kill -0 "$1" 2>/dev/null || return 1
    case $(ps -ww -p "$1" -o stat= -o args= 2>/dev/null) in
        Z*) return 1 ;;
        *"$2"*"/hosts/$host" | *"$2"*"/hosts/$host/"*) return 0 ;;
    esac
    return 1
}

say home "$HOME"
if test -L "$mine/current"; then say current "$(basename "$(readlink "$mine/current")")"; fi
if test -f "$mine/token"; then say token "$(digest "$mine/token")"; fi
if test -f "$mine/serving"; then
    read -r pid release <"$mine/serving"
    alive=0
    if runs "$pid" ""; then alive=1; fi
    say serving "$pid" "$release" "$alive"
fi

# Which managers know this host, whether one keeps it running, how often it was started again

if test -f "$mine/supervisor.json"; then
    pid=$(sed -n 's/.*"pid": *\([0-9][0-9]*\).*/\1/p' "$mine/supervisor.json" 2>/dev/null)
    restarts=$(sed -n 's/.*"restarts": *\([0-9][0-9]*\).*/\1/p' "$mine/supervisor.json" 2>/dev/null)
    active=0
    if [ -n "$pid" ] && runs "$pid" supervise; then active=1; fi
    say manager process "$active" "${restarts:-0}"
fi
if test -f "$HOME/.config/systemd/user/disagg-$host.service"; then
    XDG_RUNTIME_DIR=/run/user/$(id -u)
    export XDG_RUNTIME_DIR
    shown=$(systemctl --user show -p ActiveState,NRestarts "disagg-$host.service" 2>/dev/null)
    case $shown in
        *ActiveState=active* | *ActiveState=activating* | *ActiveState=reloading*) active=1 ;;
        *) active=0 ;;
    esac
    say manager systemd "$active" "$(printf '%s\n' "$shown" | sed -n 's/^NRestarts=//p')"
fi
if test -f "/Library/LaunchDaemons/disagg.$host.plist"; then
    active=0
    shown=$(launchctl print "system/disagg.$host" 2>/dev/null) && active=1
    say manager launchd "$active" "$(printf '%s\n' "$shown" | sed -n 's/^[[:space:]]*runs = //p')"
fi

# Who listens on its ports

for port in "$@"; do
    if command -v ss >/dev/null 2>&1; then
        line=$(ss -Hltnp "sport = :$port" 2>/dev/null | head -n 1)
        [ -n "$line" ] || continue
        say port "$port" "$(printf '%s\n' "$line" | sed -n 's/.*(("\([^"]*\)",pid=\([0-9]*\).*/\2/p')" \
            "$(printf '%s\n' "$line" | sed -n 's/.*(("\([^"]*\)",pid=.*/\1/p')"
    elif command -v lsof >/dev/null 2>&1; then
        line=$(lsof -nP -iTCP:"$port" -sTCP:LISTEN -Fpc 2>/dev/null)
        if [ -n "$line" ]; then
            say port "$port" "$(printf '%s\n' "$line" | sed -n 's/^p//p' | head -n 1)" \
                "$(printf '%s\n' "$line" | sed -n 's/^c//p' | head -n 1)"
        elif netstat -an -p tcp 2>/dev/null | grep LISTEN | grep -q "[.:]$port[[:space:]]"; then
            say port "$port" "" ""
        fi
    fi
done

if test -f "$mine/logs/server.log"; then
    tail -n 50 "$mine/logs/server.log" | cut -c1-2000 | tr '\t' ' ' | while IFS= read -r line || [ -n "$line" ]; do
        printf 'log%s%s\n' "$tab" "$line"
    done
fi
say end
