# $1: a line for sh. $DISAGG_FOLDER: that of hosts.toml.
cd "$DISAGG_FOLDER" || exit 1
unset DISAGG_FOLDER DISAGG_WATCH_URL # a secret of `disagg status --notify`
exec /bin/sh -c "$1" </dev/null
