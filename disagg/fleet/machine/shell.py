"""The POSIX sh that every machine understands, made from values: nothing here runs anything.

A machine is given one constant command, `BOOTSTRAP`, and reads what to do from its standard input: first the length
of a program in bytes, then the program, then what the program itself reads. So no value is parsed by the user's login
shell (which may be fish or csh), and nothing but paths is ever visible in a process list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from disagg.errors import FleetError

MARK = b"@disagg "
"""Begins the line after which a stream is the program's own: login shells may greet before."""

BOOTSTRAP = (
    'exec /bin/sh -c \'echo @disagg $$; echo @disagg 0 >&2; read -r n && eval "$(dd bs=1 count="$n" 2>/dev/null)"\''
)

GUARD = r"""
live=; timer=
finish() { for p in $live; do kill -s "$1" -- "-$p"; done; }
end() { finish TERM; sleep 1; finish KILL; }
exec 3>&1 >/dev/null 2>&1
while read -r word rest; do
  [ -z "$timer" ] || kill "$timer"
  timer=
  case $word in
    watch) live=$rest; echo @watching >&3 ;;
    live) live=$rest ;;
    end) (live=$rest; end) 3>&- & ;;
  esac
  [ -z "$live" ] || { (trap 'kill "$nap"; exit' TERM; sleep "$1" & nap=$!; wait "$nap" && end) 3>&- & timer=$!; }
done
[ -z "$timer" ] || kill "$timer"
end
"""
"""Ends process groups whose client is gone: at the end of its input, or $1 seconds after the last line of it.

sshd tells nobody that a link is dead, and a command without a terminal survives its connection. Lines: `live PGID...`
names all groups to watch (none: no timer runs), `watch PGID...` too and is answered with WATCHING, `end PGID` ends one
now, `beat` says that the client still lives.
"""

WATCHING = b"@watching\n"

_PLACE = r"""
LC_ALL=C; export LC_ALL
p=$1
case $p in "~/"*) p=$HOME/${p#"~/"} ;; esac
case $p in /*) ;; *) p=./$p ;; esac
fail() { echo "$*" >&2; exit 1; }
"""

_PARENT = r"""
d=${p%/*}
b=${p##*/}
[ -d "${d:-/}" ] || mkdir -p "$d" || exit 1
t=$d/.$b.part.$$
"""

READ = _PLACE + 'exec tail -c "$2" <"$p"\n'
"""$1: the file; $2: at most so many bytes of its end."""

WRITE = (
    _PLACE
    + _PARENT
    + r"""
[ -d "$p" ] && fail "$p: Is a directory"
trap 'rm -f "$t"' 0
trap 'exit 1' 1 2 13 15
rm -f "$t"
umask 077
exec 3>"$t" || exit 1
chmod "$2" "$t" || exit 1
cat >&3 || exit 1
exec 3>&-
[ "$(wc -c <"$t")" -eq "$3" ] || fail "only a part arrived"
mv -f "$t" "$p"
"""
)
"""$1: the file; $2: its mode in octal, set before there is content; $3: its size. Standard input: the content."""

PUT_TREE = (
    _PLACE
    + _PARENT
    + r"""
o=$d/.$b.old.$$
back() { if [ ! -e "$p" ] && [ -e "$o" ]; then mv "$o" "$p"; fi; } # ended between the two mv below
trap 'back; rm -rf "$t"' 0
trap 'exit 1' 1 2 13 15
umask 022
rm -rf "$t" "$o"
mkdir "$t" || exit 1
(cd "$t" && exec tar -xzof -) || {  # not tar -C, which reads backslashes
  free=$(df -Pk "$t" | awk 'END { print $4 }')  # GNU tar says "Wrote only 1536 of 10240 bytes"
  [ "${free:-64}" -ge 64 ] || echo "No space left on device" >&2
  fail "the files could not be unpacked"
}
if [ -e "$p" ] || [ -L "$p" ]; then
  mv -f "$p" "$o" || exit 1
  mv "$t" "$p" || exit 1
  rm -rf "$o"
else
  mv "$t" "$p" || exit 1
fi
"""
)
"""$1: the folder. Standard input: a tar.gz, of which tar and gzip take no part for the whole."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def program(
    argv: Sequence[str],
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    takes_input: bool = False,
) -> bytes:
    """What BOOTSTRAP reads: environment, then the script with argv as $1, $2, ..., or else argv as a command."""
    for text in (*argv, *(environment or {}).values()):
        if "\0" in text:
            raise FleetError("an argument or environment value holds a NUL character", "no command can take that")
    lines = [f"export {_name(key)}={shlex.quote(value)}" for key, value in sorted((environment or {}).items())]
    lines.append("cd 2>/dev/null")  # home: a forced command or a container may begin elsewhere
    words = " ".join(map(shlex.quote, argv))
    if not takes_input:
        lines.append("exec </dev/null")
    if script is None:
        # Not exec: a shell that waits tells "killed by signal 9" as code 137, where SSH has no code for it.
        lines.append(f"{words}; exit $?")
    else:
        lines += [f"set -- {words}", script]
    body = "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n"
    return b"%d\n%s" % (len(body), body)


def _name(key: str) -> str:
    if not _VARIABLE.fullmatch(key):
        raise FleetError(f"{key!r} is no name for an environment variable", "letters, digits and _ only")
    return key
