# What a machine is and has. $1: the host's name. $2: the python that hosts.toml names, or nothing. $3...: ports to check.
# $NVIDIA_SMI_ARGUMENTS: for nvidia-smi. Changes nothing.
# shellcheck disable=SC2086,SC2088,SC2154

host=$1
configured=$2
shift 2
root=$HOME/.disagg
mine=$root/hosts/$host

content() { # the name that a release folder should have: the hash of its content, computed as in release.py
    (cd "$1" && find . \( -name __pycache__ -o -path ./list \) -prune -o -type f -exec $sum {} +) 2>/dev/null | sort | $sum | cut -c1-16
}

# The machine

system=$(uname -sm)
os=${system%% *}
user=$(id -un)
emit machine "$os" "${system#* }" "$user" "$(id -u)"
if test -w "$HOME" && { test ! -e "$root" || test -w "$root"; }; then emit home "$HOME" 1; else emit home "$HOME" 0; fi
if test -d "$root"; then full=$root; else full=$HOME; fi
emit disk "$(df -Pk "$full" 2>/dev/null | awk 'END { print $4 }')"
if [ "$os" = Darwin ]; then
    emit os_version "$(sw_vers -productVersion 2>/dev/null)"
    emit memory "$(($(sysctl -n hw.memsize 2>/dev/null || echo 0) / 1024))"
    emit wired_limit "$(sysctl -n iogpu.wired_limit_mb 2>/dev/null)"
    if command -v rdma_ctl >/dev/null 2>&1; then emit rdma "$(rdma_ctl status 2>&1 | head -n 1)"; fi
else
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null)
    emit os_version "${libc#* }"
    awk -v OFS='\t' '/^MemTotal:/ { print "memory", $2 } /^MemAvailable:/ { print "available", $2 }' /proc/meminfo 2>/dev/null
    for device in /dev/nvidiactl /dev/nvidia0; do if test -e "$device"; then emit device "$device"; fi; done
    if command -v lspci >/dev/null 2>&1 && lspci -d 10de: 2>/dev/null | grep -q .; then emit device pci; fi
    if command -v nvidia-smi >/dev/null 2>&1; then
        emit smi "$(command -v nvidia-smi)"
        shown=$(timeout 10 nvidia-smi $NVIDIA_SMI_ARGUMENTS 2>&1)
        code=$?
        if [ $code -ne 0 ]; then emit smi_failed "$code" "$(printf '%s' "$shown" | head -n 2)"
        else printf '%s\n' "$shown" | while IFS= read -r line; do emit gpu "$line"; done; fi
    fi
fi

# Pythons

about_python='import importlib.util as u, sys
print("%d.%d.%d" % sys.version_info[:3], int(bool(u.find_spec("ensurepip") and u.find_spec("venv"))), sys.executable)'

try_python() { # path, 1 if hosts.toml names it
    test -x "$1" && about=$("$1" -I -S -c "$about_python" 2>/dev/null </dev/null) || return 1
    version=${about%% *} rest=${about#* }
    emit python "$2" "$version" "${rest%% *}" "${rest#* }"
}

if [ -n "$configured" ]; then
    case $configured in
        '~/'*) configured=$HOME/${configured#??} ;;
    esac
    try_python "$configured" 1 || emit no_python "$configured"
fi
seen=
saved=$IFS
IFS=:
for folder in $PATH "$HOME/.local/bin"; do
    IFS=$saved
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        path=$folder/$name
        test -x "$path" || continue
        # Without the developer tools, this one opens a window that asks to install them.
        if [ "$os$path" = Darwin/usr/bin/python3 ] && ! xcode-select -p >/dev/null 2>&1; then continue; fi
        again=
        for other in $seen; do if [ "$path" -ef "$other" ]; then again=1; fi; done
        case $path in *[[:space:]]*) continue ;; esac
        [ -z "$again" ] || continue
        seen="$seen $path"
        try_python "$path" 0
    done
    IFS=:
done
for folder in $PATH "$HOME/.local/bin" "$HOME/.cargo/bin"; do
    if test -x "$folder/uv"; then
        version=$("$folder/uv" --version 2>/dev/null)
        version=${version#* }
        emit uv "$folder/uv" "${version%% *}"
        break
    fi
done
IFS=$saved

# Service managers

unit=$HOME/.config/systemd/user/disagg-$host.service
if test -d /run/systemd/system && command -v systemctl >/dev/null 2>&1; then
    version=$(systemctl --version 2>/dev/null | awk 'NR == 1 { print $2 }')
    usable=0
    if XDG_RUNTIME_DIR=/run/user/$(id -u) systemctl --user show-environment >/dev/null 2>&1; then usable=1; fi
    linger=0
    if test -e "/var/lib/systemd/linger/$user"; then linger=1; fi
    emit systemd "$version" "$usable" "$linger"
fi
if test -f "$unit"; then
    enabled=0
    if test -L "$HOME/.config/systemd/user/default.target.wants/disagg-$host.service"; then enabled=1; fi
    emit installed systemd "$(digest "$unit")" "$enabled"
fi
if command -v launchctl >/dev/null 2>&1; then
    without_password=0
    if sudo -n true 2>/dev/null; then without_password=1; fi
    emit launchd "$without_password"
fi
for name in "$host" "$host.wired-limit"; do
    plist=/Library/LaunchDaemons/disagg.$name.plist
    if test -f "$plist"; then emit installed "launchd:$name" "$(digest "$plist")" 1; fi
done

# What is deployed

if test -d "$mine"; then emit deployed 1; fi
emit_server "$host"
if test -f "$mine/supervisor.json" || [ -n "$supervisor" ]; then emit installed process '' 1; fi
for release in "$root"/hosts/*/releases/*; do
    if test -d "$release"; then
        owner=${release%/releases/*} name=${release##*/}
        emit release "${owner##*/}" "$name" "$(cat "$release/environment" 2>/dev/null)"
        if [ "$owner" = "$mine" ]; then
            emit sent "$name" "$(modified "$release")"
            if test -f "$release/list/hosts.toml"; then emit list "$name" "$(digest "$release/list/hosts.toml")"; fi
            if [ "$(content "$release")" != "$name" ]; then emit damaged "$name"; fi
            if test -d "$release/disagg" && ! test -d "$release/disagg/tls"; then emit before_tls "$name"; fi
        fi
    fi
done
for environment in "$root"/envs/*; do
    if test -d "$environment"; then
        complete=0
        if test -f "$environment/.complete" && test -x "$environment/bin/python"; then complete=1; fi
        emit environment "${environment##*/}" "$complete"
    fi
done
for model in "$root"/models/carried/*; do
    if test -d "$model"; then emit carried "${model##*/}"; fi
done
for leftover in "$mine"/incoming "$mine"/releases/.[!.]* "$mine"/.[!.]*; do
    if test -e "$leftover" || test -L "$leftover"; then emit leftover "${leftover#"$mine"/}"; fi
done
for part in "$mine"/uploads/*; do
    if test -f "$part"; then emit upload "${part##*/}" "$(($(wc -c <"$part")))"; fi
done
for lock in "$root"/hosts/*/lock; do
    if test -d "$lock" && [ "$lock" != "$mine/lock" ]; then emit others_deploy 1; fi
done

# Its server's version and log, who has started or stopped it, listening ports

version=$(sed -n 's/^VERSION = "\(.*\)"/\1/p' "$mine/current/disagg/version.py" 2>/dev/null)
if [ -n "$version" ]; then emit version "$version"; fi
if test -f "$mine/current/digests" && read -r code config <"$mine/current/digests"; then emit digests "$code" "$config"; fi
if test -f "$mine/logs/audit.log"; then
    # Of the last command that starts or stops servers: its name, and "ended" unless it was cut off.
    awk -F'"' '/"event": "(start|stop|stop --all|restart|rollout)", "by"/ {
            for (n = 2; n < NF; n++) if ($n == "event") name = $(n + 2)
            ended = index($0, "\"ended\":") ? "ended" : ""
        } END { if (name) print "last\t" name "\t" ended }' "$mine/logs/audit.log"
fi
if test -f "$mine/logs/server.log"; then
    denied=$(tail -c 200000 "$mine/logs/server.log" | grep -c -e 'Errno 65' -e 'errno 65')
    if [ "$denied" -gt 0 ]; then emit errno_65 "$denied"; fi
fi
if [ $# -gt 0 ]; then
    if command -v ss >/dev/null 2>&1; then listening=$(ss -Hltn 2>/dev/null | awk '{ print $4 }')
    else listening=$(netstat -an -p tcp 2>/dev/null | awk '/LISTEN/ { print $4 }'); fi
    for port in "$@"; do
        case $listening$newline in *[.:]"$port$newline"*) emit listening "$port" ;; esac
    done
fi
emit end
