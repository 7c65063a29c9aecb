# $@: paths to remove.
exec rm -rf "$@"
