# $1: ~/.disagg. $2: this host's folder. $3...: paths to remove.
umask 077
set -e
mkdir -p "$1/envs" "$1/models/carried" "$2/releases" "$2/logs"
shift 2
if [ $# -gt 0 ]; then rm -rf "$@"; fi
