# One host's server: what is deployed, whether it runs, who starts it again, who has its ports, its last log lines.
# $1: the host's name. $2...: the ports that its server uses. Changes nothing.

host=$1
shift
mine=$HOME/.disagg/hosts/$host

emit home "$HOME"
emit_server "$host"
model=$(awk -v plain="[hosts.$host]" -v quoted="[hosts.\"$host\"]" '
    /^\[/ { here = $0 == plain || $0 == quoted }
    here && /^model = "/ { sub(/^model = "/, ""); sub(/"$/, ""); print; exit }' "$mine/current/hosts.toml" 2>/dev/null)
if [ -n "$model" ]; then emit model "$model"; fi

# The service managers that have a definition of this host: whether the service is active, how often it was restarted

supervisor=$(supervisor_process "$host")
if test -f "$mine/supervisor.json" || [ -n "$supervisor" ]; then
    restarts=$(sed -n 's/.*"restarts": *\([0-9][0-9]*\).*/\1/p' "$mine/supervisor.json" 2>/dev/null)
    active=0
    if [ -n "$supervisor" ]; then active=1; fi
    emit manager process "$active" "${restarts:-0}"
fi
if test -f "$HOME/.config/systemd/user/disagg-$host.service"; then
    XDG_RUNTIME_DIR=/run/user/$(id -u)
    export XDG_RUNTIME_DIR
    shown=$(systemctl --user show -p ActiveState,NRestarts "disagg-$host.service" 2>/dev/null)
    case $shown in
        *ActiveState=active* | *ActiveState=activating* | *ActiveState=reloading*) active=1 ;;
        *) active=0 ;;
    esac
    emit manager systemd "$active" "$(printf '%s\n' "$shown" | sed -n 's/^NRestarts=//p')"
fi
if test -f "/Library/LaunchDaemons/disagg.$host.plist"; then
    active=0
    shown=$(launchctl print "system/disagg.$host" 2>/dev/null) && active=1
    emit manager launchd "$active" "$(printf '%s\n' "$shown" | sed -n 's/^[[:space:]]*runs = //p')"
fi

# The programs that listen on its ports

for port in "$@"; do
    if command -v ss >/dev/null 2>&1; then
        line=$(ss -Hltnp "sport = :$port" 2>/dev/null | head -n 1)
        [ -n "$line" ] || continue
        emit port "$port" "$(printf '%s\n' "$line" | sed -n 's/.*(("\([^"]*\)",pid=\([0-9]*\).*/\2/p')" \
            "$(printf '%s\n' "$line" | sed -n 's/.*(("\([^"]*\)",pid=.*/\1/p')"
    elif command -v lsof >/dev/null 2>&1; then
        line=$(lsof -nP -iTCP:"$port" -sTCP:LISTEN -Fpc 2>/dev/null)
        if [ -n "$line" ]; then
            emit port "$port" "$(printf '%s\n' "$line" | sed -n 's/^p//p' | head -n 1)" \
                "$(printf '%s\n' "$line" | sed -n 's/^c//p' | head -n 1)"
        elif netstat -an -p tcp 2>/dev/null | grep LISTEN | grep -q "[.:]$port[[:space:]]"; then
            emit port "$port" "" ""
        fi
    fi
done

if test -f "$mine/logs/server.log"; then
    # A log that has just been begun anew does not have the reason of an earlier end: the one before does.
    { tail -n 50 "$mine/logs/server.log.1" 2>/dev/null; tail -n 50 "$mine/logs/server.log"; } | tail -n 50 | cut -c1-2000 | tr '\t' ' ' | while IFS= read -r line || [ -n "$line" ]; do
        printf 'log%s%s\n' "$tab" "$line"
    done
fi
emit end
