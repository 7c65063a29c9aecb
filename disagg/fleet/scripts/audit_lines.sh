# $1: the audit's file. $2...: lines for it. After audit.sh.
audit "$@"
