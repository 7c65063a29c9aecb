#!/bin/sh
# The programs of the system that tests need (tests/programs.py): sshd, ip, tc, ps, sudo, git, a C compiler. Brought where
# that needs no question: as root, with apt. Without them the tests that need them are skipped.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
packages="openssh-server:sshd openssh-client:ssh iproute2:ip iproute2:tc procps:ps sudo:sudo git:git gcc:cc libc6-dev:cc"
missing=
for one in $packages; do
    command -v "${one#*:}" >/dev/null || missing="$missing ${one%%:*}"
done
# vLLM's CPU build loads this library, which no wheel brings.
if [ "$(uname)" = Linux ] && ! /sbin/ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1'; then missing="$missing libnuma1"; fi
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    # Only the programs are wanted: no sshd of the system's own is to start.
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends $missing >/dev/null
else
    echo "some tests are skipped, for want of:$missing (sudo apt-get install$missing)" >&2
fi
