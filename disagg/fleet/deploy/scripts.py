"""The POSIX-sh scripts that steps run. Values come as parameters, never in the text."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from disagg.fleet.changes.links import MOVE_LINKS

__all__ = ["ADOPT", "CHECK", "ENVIRONMENT", "INSTALL_DAEMONS", "MOVE_LINKS", "PREPARE", "TIDY", "UNINSTALL"]

ENVIRONMENT: Final = Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")

PREPARE: Final = """\
# $1: ~/.disagg. $2: this host's folder. $3...: paths to remove.
umask 077
set -e
mkdir -p "$1/envs" "$1/models/carried" "$2/releases" "$2/logs"
shift 2
if [ $# -gt 0 ]; then rm -rf "$@"; fi
"""

ADOPT: Final = """\
# Moves $1 to $2 unless $2 exists.
test -d "$2" || mv "$1" "$2"
"""

CHECK: Final = """\
# $1: python. $2: the release. $3: the host. $4: the program that serves it. $5...: modules that must be importable.
python=$1 release=$2
shift
exec env PYTHONPATH="$release" "$python" -P -c 'import importlib, importlib.util, sys
from pathlib import Path
release, host, program, *modules = sys.argv[1:]
def importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
if missing := [name for name in modules if not importable(name)]:
    sys.exit("the environment misses " + ", ".join(missing))
importlib.import_module(program + ".__main__")
from disagg.config import load
if host not in load(Path(release, "hosts.toml")).hosts:
    sys.exit("hosts.toml of the release misses " + host)
' "$@"
"""

INSTALL_DAEMONS: Final = """\
# $1: the release's install script, which needs root.
if ! sudo -n true 2>/dev/null; then
    echo 'launchd daemons belong to root, and sudo asks for a password here' >&2
    exit 77
fi
exec sudo -n /bin/sh "$1"
"""

TIDY: Final = """\
# $@: paths to remove.
exec rm -rf "$@"
"""

UNINSTALL: Final = """\
# $1: ~/.disagg. $2: the host. $3: 1 to remove models. $4...: environments that no other host needs.
root=$1 host=$2 models=$3
shift 3
set -e
if [ $# -gt 0 ]; then rm -rf "$@"; fi
rm -rf "$root/hosts/$host"
if [ "$models" = 1 ]; then # those that no other host of this machine reads
    for model in "$root"/models/carried/*; do
        grep -qF "/models/carried/${model##*/}" "$root"/hosts/*/releases/*/hosts.toml 2>/dev/null || rm -rf "$model"
    done
fi
rmdir "$root/hosts" 2>/dev/null || exit 0
rm -rf "$root/envs"
rmdir "$root/models/carried" "$root/models" "$root" 2>/dev/null || exit 0
"""
