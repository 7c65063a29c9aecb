# Serves one host until SIGTERM. Each release has its own, which runs the release it is part of, whichever link it is
# called by. Its values: $folder, of the host; $python, $program, $host; $config, its hosts.toml below the release;
# $state, a folder for what the program keeps, or nothing; $log_limit, $log_variable.
# shellcheck disable=SC2154
release=$(cd "$(dirname "$0")" && pwd -P) || exit 1
hash=${release##*/}
log=$folder/logs/server.log
umask 077
cd "$folder" || exit 1
if test -f "$log" && [ "$(wc -c <"$log")" -gt "$log_limit" ]; then mv -f "$log" "$log.1"; fi
exec >>"$log" 2>&1
printf '{"time": "%s", "level": "info", "event": "starting", "release": "%s", "pid": %s}\n' \
    "$(date -u +%Y-%m-%dT%H:%M:%S.000Z)" "$hash" "$$"
if printf '%s %s\n' "$$" "$hash" >.serving.$$; then mv -f .serving.$$ serving
else # a full disk: the present file has its block already
    rm -f .serving.$$
    printf '%s %s\n' "$$" "$hash" 1<>serving
fi
DISAGG_TOKEN_FILE=$folder/token
DISAGG_GATEWAY_FOLDER=$folder
DISAGG_RELEASE=$hash
PYTHONPATH=$release
export "$log_variable=$log" DISAGG_TOKEN_FILE DISAGG_GATEWAY_FOLDER DISAGG_RELEASE PYTHONPATH
exec "$python" -P -u -m "$program" --config "$release/$config" --host "$host" ${state:+--state "$state"}
