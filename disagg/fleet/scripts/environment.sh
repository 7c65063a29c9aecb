# Makes a python environment, whole or not at all: it is built in one folder and renamed to the other.
# $1: where to build. $2: where it belongs. $3: folder with requirements.txt, constraints.txt, perhaps wheels/ and
# hashed.txt: packages to install first, whose files must have one of the hashes there. $4: a python, or for uv a
# version. $5: uv, or nothing for venv and pip. $6: 1 to keep what is installed for $4. $7...: options for the
# installer.
set -eu
build=$1 final=$2 spec=$3 python=$4 uv=$5 site_packages=$6
shift 6
whole() { test -f "$final/.complete" && test -x "$final/bin/python"; }
builds() { # a pid: whether it still is a shell, and not a later process with the pid of a builder that was killed
    kill -0 "$1" 2>/dev/null && case $(ps -p "$1" -o comm= 2>/dev/null) in *sh) ;; *) return 1 ;; esac
}
building=$final.building # a link to the pid of whoever builds it: another host of this machine waits for that one
mkdir -p "${final%/*}"
while :; do
    if whole; then exit 0; fi
    if ln -s $$ "$building" 2>/dev/null; then break; fi
    other=$(readlink "$building" 2>/dev/null) || { if test -L "$building"; then continue; else break; fi; }
    if builds "$other"; then
        if [ -z "${told:-}" ]; then echo "process $other builds it for another host of this machine"; fi
        told=1
        sleep 1
    else
        rm -f "$building"
    fi
done
trap 'rm -f "$building"' EXIT
rm -rf "$build"
constraints=$spec/constraints.txt
install() {
    if [ -n "$uv" ]; then "$uv" pip install --python "$build/bin/python" "$@"
    else
        "$build/bin/python" -m pip install --no-input --retries 2 --disable-pip-version-check --progress-bar off "$@"
    fi
}
if [ -n "$uv" ]; then
    "$uv" venv --quiet --python "$python" "$build"
else
    "$python" -m venv "$build"
    if [ "$site_packages" = 1 ]; then
        # Python 3.11 puts an old setuptools into a new environment, which would go before the one that is there.
        "$build/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check setuptools 2>/dev/null || true
        # A .pth file, since --system-site-packages sees the base python's packages only, and these may be a venv's.
        link=$("$build/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host_site_packages.pth
        "$python" -E -c 'import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(path)' >"$link"
        # What is there already keeps its version: a vendor has built it for this machine.
        "$build/bin/python" -I -c 'import importlib.metadata, re, sys
def plain(name): return re.sub("[-_.]+", "-", name).lower()
names = (distribution.metadata["Name"] for distribution in importlib.metadata.distributions())
there = {plain(name) for name in names if name}
for line in open(sys.argv[1], encoding="utf-8"):
    if plain(line.partition("==")[0].strip()) not in there:
        sys.stdout.write(line)' "$constraints" >"$constraints.open"
        constraints=$constraints.open
    fi
fi
if test -f "$spec/hashed.txt"; then
    install --no-deps --require-hashes -r "$spec/hashed.txt" "$@"
fi
install -r "$spec/requirements.txt" -c "$constraints" "$@"
: >"$build/.complete"
if whole; then rm -rf "$build" # another host of this machine was quicker, and may be using it by now
else
    rm -rf "$final"
    mv "$build" "$final"
fi
rm -rf "$spec"
