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

if test -f "$mine/supervisor.json" || [ -n "$supervisor" ]; then
    restarts=
    if test -f "$mine/supervisor.json"; then read -r restarts <"$mine/supervisor.json"; fi
    case $restarts in
        *'"restarts": '*) restarts=${restarts#*'"restarts": '} restarts=${restarts%%[!0-9]*} ;;
        *) restarts= ;;
    esac
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

if command -v ss >/dev/null 2>&1; then
    filter=
    for port in "$@"; do filter="${filter:+$filter or }sport = :$port"; done
    if [ $# -gt 0 ]; then listening=$(ss -Hltnp "$filter" 2>/dev/null); else listening=; fi
    for port in "$@"; do
        case $listening in
            *[.:]"$port "*) ;;
            *) continue ;;
        esac
        holder=${listening#*[.:]"$port "}
        holder=${holder%%"$newline"*}
        case $holder in # users:(("python",pid=12,fd=3)), of the account's own processes
            *'(("'*) holder=${holder#*'(("'} pid=${holder#*pid=} && emit port "$port" "${pid%%[!0-9]*}" "${holder%%'"'*}" ;;
            *) emit port "$port" "" "" ;;
        esac
    done
elif command -v lsof >/dev/null 2>&1; then
    for port in "$@"; do
        line=$(lsof -nP -iTCP:"$port" -sTCP:LISTEN -Fpc 2>/dev/null)
        if [ -n "$line" ]; then
            emit port "$port" "$(printf '%s\n' "$line" | sed -n 's/^p//p' | head -n 1)" \
                "$(printf '%s\n' "$line" | sed -n 's/^c//p' | head -n 1)"
        elif netstat -an -p tcp 2>/dev/null | grep LISTEN | grep -q "[.:]${port}[[:space:]]"; then
            emit port "$port" "" ""
        fi
    done
fi

if test -f "$mine/logs/server.log"; then
    # A log that has just been begun anew does not have the reason of an earlier end: the one before does.
    { if test -f "$mine/logs/server.log.1"; then tail -n 50 "$mine/logs/server.log.1"; fi; tail -n 50 "$mine/logs/server.log"; } |
        awk '{ gsub(/\t/, " "); line[NR % 50] = "log\t" substr($0, 1, 2000) }
            END { for (n = NR > 50 ? NR - 49 : 1; n <= NR; n++) print line[n % 50] }'
fi
emit end
