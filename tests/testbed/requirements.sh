#!/bin/sh
# What the test bed of SSH hosts needs: sshd, ip, tc, sudo. Brought where that needs no question: as root, with apt.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
missing=
command -v sshd >/dev/null || missing="openssh-server openssh-client"
command -v ip >/dev/null && command -v tc >/dev/null || missing="$missing iproute2"
command -v sudo >/dev/null || missing="$missing sudo"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    # Only the programs are wanted: no sshd of the system's own is to start.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends $missing >/dev/null
else
    echo "the tests of SSH hosts need$([ -n "$missing" ] && echo ": sudo apt-get install -y $missing")" >&2
fi
