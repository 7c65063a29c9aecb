# $1: a host's folder. Then pairs: a link, and the release that it points at from now on. They are moved in this order.
cd "$1" || exit 1
shift
while [ $# -gt 1 ]; do
    if [ "$(readlink "$1")" != "releases/$2" ]; then
        if ! test -f "releases/$2/run"; then
            echo "release $2 is incomplete" >&2
            exit 1
        fi
        rm -f ".$1.new"
        ln -s "releases/$2" ".$1.new" || exit 1
        # -T (GNU, which has --version) and -h (BSD, macOS): do not move it into the folder that the old link points to
        if mv --version >/dev/null 2>&1; then flags=-fT; else flags=-fh; fi
        mv "$flags" ".$1.new" "$1" || exit 1
    fi
    shift 2
done
