# $1: the folder of parts. $2...: parts. Prints `PART BYTES` for each that is there. After path.sh.
# shellcheck disable=SC2154
umask 077
mkdir -p "$p" && cd "$p" || exit 1
shift
for part; do if [ -f "$part" ]; then echo "$part $(($(wc -c <"$part")))"; fi; done
