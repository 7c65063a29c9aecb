# What all probes share: put before each of them. POSIX sh, as of dash and macOS. Probes run often, on machines that may
# be busy: they start few programs. No here-documents: bash needs room on a disk for each.
# shellcheck disable=SC2034,SC2046

LC_ALL=C
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/opt/homebrew/bin
export LC_ALL PATH
tab='	'
newline='
'

emit() { # kind, fields: one line
    kind=$1
    shift
    printf '%s' "$kind"
    for field in "$@"; do
        case $field in
            *"$tab"* | *"$newline"*) field=$(printf '%s' "$field" | tr '\t\n' '  ') ;;
        esac
        printf '\t%s' "$field"
    done
    printf '\n'
}

if command -v sha256sum >/dev/null 2>&1; then sum=sha256sum; else sum='shasum -a 256'; fi

digest() {
    digested=$($sum <"$1" 2>/dev/null)
    printf '%s' "${digested%% *}"
}

modified() { # a path: when it was changed, in seconds since 1970
    stat -c %Y "$1" 2>/dev/null || stat -f %m "$1" 2>/dev/null
}

find_processes() { # host: the pid of its supervisor, and $pid, $release and $alive of its server. Records may be lost
    own=$HOME/.disagg/hosts/$1
    pid='' release=''
    if test -f "$own/serving"; then read -r pid release <"$own/serving"; fi
    running=$pid
    if [ -n "$pid" ] && ! kill -0 "$pid" 2>/dev/null; then running=; fi
    real=$(cd "$own" 2>/dev/null && pwd -P)
    set -- $(ps -axww -o pid= -o pgid= -o stat= -o args= 2>/dev/null |
        host=$1 pid=$running own=$own served=${real:+--config $real/releases/} awk '
        BEGIN { pid = ENVIRON["pid"]; folder = "/hosts/" ENVIRON["host"]; own = ENVIRON["own"]; served = ENVIRON["served"]
            model = " --host " ENVIRON["host"] "/" }
        $1 == pid && $3 !~ /^Z/ { alive = index($0, folder "/") || ends_with(folder) } # not another with the same pid
        !supervisor && (ends_with("supervise.py start " own) || ends_with("supervise.py restart " own)) { supervisor = $1 }
        index($0, model) { next } # the process of a model, which the keeper of this host has started
        !server && $1 == $2 && served && (at = index($0, served)) { server = $1 " " substr($0, at + length(served), 16) }
        function ends_with(words) { return substr($0, length($0) - length(words) + 1) == words }
        END { print alive + 0, (supervisor ? supervisor : "-"), server }')
    alive=${1:-0} supervisor=${2#-}
    if [ "$alive" = 0 ] && [ -n "$3" ]; then pid=$3 release=$4 alive=1; fi
}

emit_server() { # host: its releases, its token, its server. Sets $supervisor
    find_processes "$1"
    listed=$(cd "$own" 2>/dev/null && ls -ld current previous running token 2>/dev/null) # in this order
    for link in current previous running; do
        case $listed in
            *" $link -> "*)
                target=${listed#*" $link -> "}
                target=${target%%"$newline"*}
                emit "$link" "${target##*/}"
                ;;
        esac
    done
    if test -L "$own/current"; then emit switched "$(modified "$own/current")"; fi
    if test -f "$own/keys.json"; then emit keys "$(digest "$own/keys.json")"; fi
    if test -f "$own/token"; then
        mode=${listed##*"$newline"}
        mode=${mode%"${mode#??????????}"}
        while IFS= read -r line || [ -n "$line" ]; do # a token each, the current one first
            if [ -n "$line" ]; then
                digested=$(printf '%s\n' "$line" | $sum)
                emit token "${digested%% *}" "$mode"
            fi
        done <"$own/token"
    fi
    if [ -n "$pid" ]; then emit serving "$pid" "$release" "$alive"; fi
}
