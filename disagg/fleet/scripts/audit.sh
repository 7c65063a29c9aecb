# What appends a line to a host's audit. $AUDIT_BYTES: a longer file is cut to its newest $AUDIT_LINES lines.
# shellcheck disable=SC2154
audit() { # $1: the file, in a folder that exists. $2: the line. A full disk stops no command.
    printf '%s\n' "$2" >>"$1" 2>/dev/null || return 0
    if [ "$(($(wc -c <"$1")))" -gt "$AUDIT_BYTES" ]; then
        tail -n "$AUDIT_LINES" "$1" >"$1.new" 2>/dev/null && mv "$1.new" "$1"
    fi
    return 0
}
