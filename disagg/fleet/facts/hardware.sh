# What the facts of a deployment do not tell about a machine. Lines of tab-separated fields; "end" comes last.
# $1: the host's name. Changes nothing. POSIX sh.

LC_ALL=C
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/opt/homebrew/bin
export LC_ALL PATH
mine=$HOME/.disagg/hosts/$1
say() {
    printf '%s' "$1"
    shift
    for field in "$@"; do printf '\t%s' "$(printf '%s' "$field" | tr '\t\n' '  ')"; done
    printf '\n'
}

if [ "$(uname -s)" = Darwin ]; then
    say wired_limit "$(sysctl -n iogpu.wired_limit_mb 2>/dev/null)"
    if command -v rdma_ctl >/dev/null 2>&1; then say rdma "$(rdma_ctl status 2>&1 | head -n 1)"; fi
else
    say available "$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo 2>/dev/null)"
    for device in /dev/nvidiactl /dev/nvidia0; do if test -e "$device"; then say device "$device"; fi; done
    if command -v lspci >/dev/null 2>&1 && lspci -d 10de: 2>/dev/null | grep -q .; then say device pci; fi
    if command -v nvidia-smi >/dev/null 2>&1; then
        say smi "$(command -v nvidia-smi)"
        fields=name,driver_version,memory.total,memory.free,ecc.errors.uncorrected.volatile.total,temperature.gpu
        words=$(timeout 10 nvidia-smi --query-gpu=$fields --format=csv,noheader,nounits 2>&1)
        code=$?
        if [ $code -ne 0 ]; then say smi_failed "$code" "$(printf '%s' "$words" | head -n 2)"
        else printf '%s\n' "$words" | while IFS= read -r line; do say gpu "$line"; done; fi
    fi
fi
version=$(sed -n 's/^VERSION = "\(.*\)"/\1/p' "$mine/current/disagg/version.py" 2>/dev/null)
if [ -n "$version" ]; then say version "$version"; fi
if test -f "$mine/logs/server.log"; then
    refused=$(tail -c 200000 "$mine/logs/server.log" | grep -c -e 'Errno 65' -e 'errno 65')
    if [ "$refused" -gt 0 ]; then say errno_65 "$refused"; fi
fi
say end
