# start | stop | restart | status of this host's supervisor. Its values: $folder, of the host; $python.
# shellcheck disable=SC2154
release=$(cd "$(dirname "$0")" && pwd -P) || exit 1
exec "$python" -P -S "$release/disagg/fleet/services/supervise.py" "$1" "$folder"
