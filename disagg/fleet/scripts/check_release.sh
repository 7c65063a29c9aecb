# $1: python. $2: the release. $3: its hosts.toml, below it. $4: the host. $5: the program that serves it. $6...: modules
# that must be importable.
python=$1 release=$2
shift
exec env PYTHONPATH="$release" "$python" -P -c 'import importlib, importlib.util, sys
from pathlib import Path
release, config, host, program, *modules = sys.argv[1:]
def importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
if missing := [name for name in modules if not importable(name)]:
    sys.exit("the environment misses " + ", ".join(missing))
importlib.import_module(program + ".__main__")
from disagg.config import load
if host not in load(Path(release, config)).hosts:
    sys.exit("hosts.toml of the release misses " + host)
' "$@"
