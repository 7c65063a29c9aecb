# What a machine is and has, in one round trip: lines of tab-separated fields, first field the kind; "end" comes last.
# $1: the host's name. $2: the python that hosts.toml names, or nothing. $3...: ports of which to tell who has them.
# Changes nothing. POSIX sh: runs in dash and in the sh of macOS.

LC_ALL=C
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/opt/homebrew/bin
export LC_ALL PATH
host=$1
configured=$2
shift 2
root=$HOME/.disagg
mine=$root/hosts/$host
tab=$(printf '\t')
newline='
'

say() {
    kind=$1
    shift
    printf '%s' "$kind"
    for field in "$@"; do
        case $field in
            *"$tab"* | *"$newline"*) field=$(printf '%s' "$field" | tr '\t\n' '  ') ;;
        esac
        printf '\t%s' "$field"
    done
    printf '\n'
}

if command -v sha256sum >/dev/null 2>&1; then sum=sha256sum; else sum='shasum -a 256'; fi

digest() {
    $sum <"$1" 2>/dev/null | cut -c1-64
}

content() { # the name that a release folder should have, from what is in it; as in package.py
    (cd "$1" && find . -name __pycache__ -prune -o -type f -exec $sum {} +) 2>/dev/null | sort | $sum | cut -c1-16
}

mode() {
    ls -ld "$1" 2>/dev/null | cut -c1-10
}

# The machine

os=$(uname -s)
user=$(id -un)
say machine "$os" "$(uname -m)" "$user" "$(id -u)"
if test -w "$HOME" && { test ! -e "$root" || test -w "$root"; }; then say home "$HOME" 1; else say home "$HOME" 0; fi
if test -d "$root"; then full=$root; else full=$HOME; fi
say disk "$(df -Pk "$full" 2>/dev/null | awk 'END { print $4 }')"
if [ "$os" = Darwin ]; then
    say os_version "$(sw_vers -productVersion 2>/dev/null)"
    say memory "$(($(sysctl -n hw.memsize 2>/dev/null || echo 0) / 1024))"
else
    say os_version "$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{ print $2 }')"
    say memory "$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo 2>/dev/null)"
    if command -v nvidia-smi >/dev/null 2>&1; then
        timeout 10 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null |
            while IFS= read -r line; do say gpu "${line%,*}" "${line##*, }"; done
    fi
fi

# Pythons. Absolute paths, since a non-login shell's PATH is short.

about_python='import importlib.util as u, sys
print("%d.%d.%d" % sys.version_info[:3], int(bool(u.find_spec("ensurepip") and u.find_spec("venv"))), sys.executable)'

try_python() { # path, 1 if hosts.toml names it
    test -x "$1" && about=$("$1" -I -c "$about_python" 2>/dev/null </dev/null) || return 1
    version=${about%% *} rest=${about#* }
    say python "$2" "$version" "${rest%% *}" "${rest#* }"
}

if [ -n "$configured" ]; then
    case $configured in
        '~/'*) configured=$HOME/${configured#??} ;;
    esac
    try_python "$configured" 1 || say no_python "$configured"
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
        say uv "$folder/uv" "$("$folder/uv" --version 2>/dev/null | awk '{ print $2 }')"
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
    say systemd "$version" "$usable" "$linger"
fi
if test -f "$unit"; then
    enabled=0
    if test -L "$HOME/.config/systemd/user/default.target.wants/disagg-$host.service"; then enabled=1; fi
    say installed systemd "$(digest "$unit")" "$enabled"
fi
if command -v launchctl >/dev/null 2>&1; then
    without_password=0
    if sudo -n true 2>/dev/null; then without_password=1; fi
    say launchd "$without_password"
fi
for name in "$host" "$host.wired-limit"; do
    plist=/Library/LaunchDaemons/disagg.$name.plist
    if test -f "$plist"; then say installed "launchd:$name" "$(digest "$plist")" 1; fi
done

if test -f "$mine/supervisor.json"; then say installed process '' 1; fi

# What is deployed

if test -d "$mine"; then say deployed 1; fi
for link in current previous; do
    if test -L "$mine/$link"; then say "$link" "$(basename "$(readlink "$mine/$link")")"; fi
done
for release in "$root"/hosts/*/releases/*; do
    if test -d "$release"; then
        owner=${release%/releases/*} name=${release##*/}
        say release "${owner##*/}" "$name" "$(cat "$release/environment" 2>/dev/null)"
        if [ "$owner" = "$mine" ] && [ "$(content "$release")" != "$name" ]; then say damaged "$name"; fi
    fi
done
for environment in "$root"/envs/*; do
    if test -d "$environment"; then
        complete=0
        if test -f "$environment/.complete" && test -x "$environment/bin/python"; then complete=1; fi
        say environment "${environment##*/}" "$complete"
    fi
done
for model in "$root"/models/carried/*; do
    if test -d "$model"; then say carried "${model##*/}"; fi
done
if test -f "$mine/token"; then say token "$(digest "$mine/token")" "$(mode "$mine/token")"; fi
for leftover in "$mine"/incoming "$mine"/releases/.[!.]* "$mine"/.[!.]*; do
    if test -e "$leftover" || test -L "$leftover"; then say leftover "${leftover#"$mine"/}"; fi
done
for lock in "$root"/hosts/*/lock; do
    if test -d "$lock" && [ "$lock" != "$mine/lock" ]; then say others_deploy 1; fi
done

# What runs

if test -f "$mine/serving"; then
    read -r pid release <"$mine/serving"
    alive=0
    if kill -0 "$pid" 2>/dev/null; then
        case $(ps -ww -p "$pid" -o args= 2>/dev/null) in
            '' | *"/hosts/$host/"*) alive=1 ;; # not another host's server, which got the same pid after a reboot
        esac
    fi
    say serving "$pid" "$release" "$alive"
fi
if [ $# -gt 0 ]; then
    if command -v ss >/dev/null 2>&1; then listening=$(ss -Hltn 2>/dev/null | awk '{ print $4 }')
    else listening=$(netstat -an -p tcp 2>/dev/null | awk '/LISTEN/ { print $4 }'); fi
    for port in "$@"; do
        if printf '%s\n' "$listening" | grep -q "[.:]$port\$"; then say listening "$port"; fi
    done
fi
say end
