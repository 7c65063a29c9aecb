# What appends lines to a host's audit. $AUDIT_BYTES: a longer file is cut to its newest $AUDIT_LINES lines.
# shellcheck disable=SC2154
audit() { # $1: the file. $2...: the lines. Nowhere if its folder is gone, as after an uninstall. A full disk stops no command.
    file=$1
    shift
    test -d "${file%/*}" || return 0
    printf '%s\n' "$@" >>"$file" 2>/dev/null || return 0
    if [ "$(($(wc -c <"$file")))" -gt "$AUDIT_BYTES" ]; then
        tail -n "$AUDIT_LINES" "$file" >"$file.new" 2>/dev/null && mv "$file.new" "$file"
    fi
    return 0
}
