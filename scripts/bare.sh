#!/bin/bash
# Run README's commands on a bare system: as a user who is not root, in a path with a space, with a clone of this commit.
#
#   scripts/bare.sh [--bind PATH]... ROOT [COMMAND]
#
# ROOT: a folder with the system's root filesystem, and in it what README names. For example:
#   debootstrap --variant=minbase --include=make,python3,python3-venv bookworm ROOT
# COMMAND: a line for a shell in the clone; by default `make demo && make test-fast`.
# --bind: a file or folder of this machine that the system sees at the same path, read-only: certificates, the configuration
# of pip, packages. Variables whose names begin with PIP_ are passed on.
#
# Needs root, and leave to make namespaces. The system has processes and mounts of its own, which end with this command; no
# init is started. The clone stays in ROOT: the next run is a second one in the same clone, also after this one was killed.
set -euo pipefail
user=1000 clone="home/bare/a clone/disagg" bound=()
while [ "${1:-}" = --bind ]; do
    bound+=("$2")
    shift 2
done
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
root=$(realpath "$1") command=${2:-make demo && make test-fast}
here=$(realpath "$(dirname "$0")/..")
[ "$(id -u)" -eq 0 ] || { echo "error: this needs root, to mount" >&2; exit 1; }

grep -q "^bare:" "$root/etc/passwd" || {
    echo "bare:x:$user:$user::/home/bare:/bin/bash" >>"$root/etc/passwd"
    echo "bare:x:$user:" >>"$root/etc/group"
}
[ -d "$root/$clone" ] || git clone -q --no-hardlinks "$here" "$root/$clone"
git -c safe.directory='*' -C "$root/$clone" fetch -q "$here" HEAD
git -c safe.directory='*' -C "$root/$clone" reset -q --hard FETCH_HEAD
chown -R "$user:$user" "$root/home/bare"
for path in "${bound[@]}"; do
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}" && touch "$root$path"; fi
done
mapfile -t pip < <(env | grep '^PIP_' || true)

# pivot_root, because who is in a chroot may make no user namespace, as some tests do.
# shellcheck disable=SC2016  # the inner bash expands them
exec unshare --mount --pid --fork --kill-child bash -euc '
    root=$1 count=$2; shift 2
    mount --make-rprivate / && mount --bind "$root" "$root"
    while [ "$count" -gt 0 ]; do
        mount --bind "$1" "$root$1" && mount -o remount,bind,ro "$root$1"
        count=$((count - 1)); shift
    done
    cd "$root"
    mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs -o mode=1777 tmpfs dev/shm
    mkdir -p .outside && pivot_root . .outside && cd / && umount -l /.outside
    exec setpriv --reuid "$1" --regid "$1" --clear-groups env -i "${@:2}"
' bare "$root" "${#bound[@]}" "${bound[@]}" "$user" \
    HOME=/home/bare USER=bare LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin ${pip[@]+"${pip[@]}"} \
    bash -c "cd '/$clone' && $command"
