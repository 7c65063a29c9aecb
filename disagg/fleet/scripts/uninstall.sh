# $1: ~/.disagg. $2: the host. $3: 1 to remove models. $4...: environments that no other host needs.
root=$1 host=$2 models=$3
shift 3
set -e
if [ $# -gt 0 ]; then rm -rf "$@"; fi
rm -rf "$root/hosts/$host"
if [ "$models" = 1 ]; then # those that no other host of this machine reads
    for model in "$root"/models/carried/*; do
        grep -qF "/models/carried/${model##*/}" "$root"/hosts/*/releases/*/hosts.toml \
            "$root"/hosts/*/releases/*/list/hosts.toml 2>/dev/null || rm -rf "$model"
    done
fi
rmdir "$root/hosts" 2>/dev/null || exit 0
rm -rf "$root/envs"
memory=${XDG_STATE_HOME:-$HOME/.local/state}/disagg/memory # what models take of this machine: disagg/ledger.py
if ! ls "$memory"/*.json >/dev/null 2>&1; then
    rm -f "$memory/lock"
    rmdir "$memory" "${memory%/memory}" 2>/dev/null || true
fi
rmdir "$root/models/carried" "$root/models" "$root" 2>/dev/null || exit 0
