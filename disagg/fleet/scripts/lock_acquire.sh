# $1: the lock. $2: this holder, as JSON. $3: the holder whose lock may be taken over, or "*" for any. $4: the audit's
# file. $5: the line for it.
trap '' HUP INT TERM # whoever calls may be killed: no lock must be left without its holder
umask 077
LC_ALL=C # the words of an error are compared below
export LC_ALL
aside=${1%/*}/.lock.$$
mkdir -p "${1%/*}" || exit 1
holder() { cat "$1/holder" 2>/dev/null; }
if [ -n "$3" ] && test -d "$1" && { [ "$3" = '*' ] || [ "$(holder "$1")" = "$3" ]; }; then
    mv "$1" "$aside" 2>/dev/null
    if [ "$3" != '*' ] && [ "$(holder "$aside")" != "$3" ]; then mv "$aside" "$1"; fi
    rm -rf "$aside"
fi
if said=$(mkdir "$1" 2>&1); then
    if printf '%s\n' "$2" >"$1/holder"; then
        mkdir -p "${4%/*}" 2>/dev/null
        audit "$4" "$5"
        exit 0
    fi
    rm -rf "$1"
    exit 28
fi
if ! test -d "$1"; then
    printf '%s\n' "$said" >&2
    case $said in *'No space left'* | *[Qq]uota*) exit 28 ;; esac
    exit 1
fi
holder "$1"
exit 75
