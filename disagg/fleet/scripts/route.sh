# The network path to $1: the output of the system's tools, under headings. Changes nothing. POSIX sh.

LC_ALL=C
PATH=$PATH:/usr/bin:/bin:/usr/sbin:/sbin
export LC_ALL PATH
target=$1
case $target in
    *[!0-9.]*)
        case $target in
            *:*) ;;
            *)
                found=$(getent ahosts "$target" 2>/dev/null | awk 'NR == 1 { print $1 }')
                target=${found:-$target}
                ;;
        esac
        ;;
esac

if command -v ip >/dev/null 2>&1; then
    echo '@@ip-route'
    ip -o route get "$target" 2>&1
    echo '@@ip-addresses'
    ip -o addr show 2>/dev/null
    echo '@@interfaces'
    for folder in /sys/class/net/*; do
        kind=wired
        if test -e "$folder/wireless" || test -e "$folder/phy80211"; then kind=wifi; fi
        if test -e "$folder/tun_flags"; then kind=tunnel; fi
        case $(sed -n 's/^DEVTYPE=//p' "$folder/uevent" 2>/dev/null) in
            wlan) kind=wifi ;;
            wireguard | ppp | ipip | gre) kind=tunnel ;;
        esac
        case $(cat "$folder/type" 2>/dev/null) in
            772) kind=loopback ;;
            512 | 768 | 776 | 778 | 65534) kind=tunnel ;;
        esac
        printf '%s %s %s %s\n' "${folder##*/}" "$kind" "$(cat "$folder/speed" 2>/dev/null || echo -1)" \
            "$(cat "$folder/mtu" 2>/dev/null || echo 0)"
    done
elif command -v route >/dev/null 2>&1; then
    echo '@@route-get'
    route -n get "$target" 2>&1
    echo '@@ifconfig'
    ifconfig -a 2>/dev/null
    echo '@@hardware-ports'
    networksetup -listallhardwareports 2>/dev/null
fi
echo '@@end'
