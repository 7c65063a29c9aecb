# What all probes share: put before each of them. POSIX sh, as of dash and macOS.

LC_ALL=C
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/opt/homebrew/bin
export LC_ALL PATH
tab=$(printf '\t')
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
    $sum <"$1" 2>/dev/null | cut -c1-64
}

modified() { # a path: when it was changed, in seconds since 1970
    stat -c %Y "$1" 2>/dev/null || stat -f %m "$1" 2>/dev/null
}

runs() { # host, pid, a word of its command line: whether it is a process of this host, not of another with the same pid
    kill -0 "$2" 2>/dev/null || return 1
    case $(ps -ww -p "$2" -o stat= -o args= 2>/dev/null) in
        Z*) return 1 ;;
        *"$3"*"/hosts/$1" | *"$3"*"/hosts/$1/"*) return 0 ;;
    esac
    return 1
}

processes=$(ps -axww -o pid= -o pgid= -o args= 2>/dev/null) # once: it takes longer than all else on a busy machine

with_words() { # words of a command line: "pid group rest" of the processes that have them, rest being what follows
    printf '%s\n' "$processes" | words=$1 awk '
        (at = index($0, ENVIRON["words"])) { print $1, $2, substr($0, at + length(ENVIRON["words"])) }'
}

supervisor_process() { # host: the pid of its supervisor, though its record may be lost
    for verb in start restart; do
        with_words "supervise.py $verb $HOME/.disagg/hosts/$1" | awk 'NF == 2 { print $1; exit }'
    done
}

serving_process() { # host: "pid release" of the process that serves a release of it, though its record may be lost
    own=$(cd "$HOME/.disagg/hosts/$1" 2>/dev/null && pwd -P) || return 0
    with_words "--config $own/releases/" | awk '$1 == $2 { print $1, substr($3, 1, 16); exit }'
}

emit_server() { # host: its releases, its token, its server
    for link in current previous running; do
        if test -L "$HOME/.disagg/hosts/$1/$link"; then
            emit "$link" "$(basename "$(readlink "$HOME/.disagg/hosts/$1/$link")")"
        fi
    done
    link=$HOME/.disagg/hosts/$1/current
    if test -L "$link"; then emit switched "$(modified "$link")"; fi
    token=$HOME/.disagg/hosts/$1/token
    keys=$HOME/.disagg/hosts/$1/keys.json
    if test -f "$keys"; then emit keys "$(digest "$keys")"; fi
    if test -f "$token"; then
        mode=$(ls -ld "$token" 2>/dev/null | cut -c1-10)
        while IFS= read -r line || [ -n "$line" ]; do # a token each, the current one first
            if [ -n "$line" ]; then emit token "$(printf '%s\n' "$line" | $sum | cut -c1-64)" "$mode"; fi
        done <"$token"
    fi
    if test -f "$HOME/.disagg/hosts/$1/serving"; then
        read -r pid release <"$HOME/.disagg/hosts/$1/serving"
        alive=0
        if runs "$1" "$pid" ""; then alive=1; fi
    else
        pid= release= alive=0
    fi
    if [ "$alive" = 0 ]; then
        found=$(serving_process "$1")
        if [ -n "$found" ]; then pid=${found% *} release=${found#* } alive=1; fi
    fi
    if [ -n "$pid" ]; then emit serving "$pid" "$release" "$alive"; fi
}

