"""POSIX sh programs for machines, made from values. Pure: nothing here runs anything.

A machine runs one constant command, `BOOTSTRAP`, which reads from its standard input the length of a program in bytes,
then the program, then the program's own input; or "all", then a program without input. So the user's login shell (which
may be fish or csh) parses no value, and a process list shows nothing but paths.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from disagg.errors import DisaggError, FleetError

MARK = b"@disagg "
"""Starts the line before the program's own output; login shells may print a greeting before it."""

BOOTSTRAP = (
    "exec /bin/sh -c 'echo; echo @disagg $$; { echo; echo @disagg 0; } >&2; "
    'read -r n && if [ "$n" = all ]; then eval "$(cat)"; else eval "$(dd bs=1 count="$n" 2>/dev/null)"; fi\''
)
"""The empty lines end what a login shell printed without a line end, so that MARK starts a line.

dd takes no byte of the input behind the program, and two system calls per byte: a tenth of a probe's CPU time, so a
program without input is read by cat."""

GUARD = r"""
live=; timer=
finish() { for p in $live; do kill -s "$1" -- "-$p"; done; }
end() { if [ -n "$live" ]; then finish TERM; sleep 1; finish KILL; fi; }
hang_up() {
  case $(ps -o comm= -p "$PPID") in *sshd*) kill "$PPID" ;; esac
  kill "$$"
}
exec 3>&1 >/dev/null 2>&1
restart() {
  [ -z "$timer" ] || kill "$timer"
  # $! is known as soon as there is a sleep, a variable a command later. KILL: its copy of this shell may hold TERM back
  (
    before=$!
    trap '[ "$!" = "$before" ] || kill -s KILL "$!"; exit' TERM
    sleep "$1" &
    wait "$!" && { end; hang_up; }
  ) 3>&- & timer=$!
}
restart "$1"
while read -r word rest; do
  case $word in
    watch) live=$rest; echo @watching >&3 ;;
    live) live=$rest ;;
    end) (live=$rest; end) 3>&- & ;;
  esac
  restart "$1"
done
kill "$timer"
end
"""
"""Kills process groups whose client is gone: at the end of its input, or $1 seconds after its last input line. Then it
ends the sshd of this connection, too, and itself.

sshd does not notice a dead link, and a command without a terminal survives its connection. Input lines: `live PGID...`
sets the groups to watch and restarts the timer; `watch PGID...` does the same and prints WATCHING; `end PGID` kills one
group now. The client repeats `live` to show that it still runs, also while no group does.
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
"""$1: the file. $2: how many bytes of its end, at most."""

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
"""$1: the file. $2: its mode in octal, set before the content is written. $3: its size. Standard input: the content."""

PUT_TREE = (
    _PLACE
    + _PARENT
    + r"""
o=$d/.$b.old.$$
back() { if [ ! -e "$p" ] && [ -e "$o" ]; then mv "$o" "$p"; fi; } # if killed between the two mv below
trap 'back; rm -rf "$t"' 0
trap 'exit 1' 1 2 13 15
umask 022
rm -rf "$t" "$o"
mkdir "$t" || exit 1
(cd "$t" && exec tar -xzof -) || {  # not tar -C, which reads backslashes
  free=$(df -Pk "$t" | awk 'END { print $4 }')  # GNU tar prints "Wrote only 1536 of 10240 bytes"
  [ "${free:-64}" -ge 64 ] || echo "No space left on device" >&2
  fail "the files could not be unpacked"
}
q=$2
[ $# -lt 2 ] || shift 2
case $q in "~/"*) q=$HOME/${q#"~/"} ;; /* | "") ;; *) q=./$q ;; esac
while [ $# -gt 3 ]; do
  if command -v sha256sum >/dev/null 2>&1; then s=$(sha256sum <"$q/$1"); else s=$(shasum -a 256 <"$q/$1"); fi
  [ "${s%% *}" = "$2" ] || { rm -f "$q/$1"; fail "$4: what arrived is not what was sent"; }
  case $4 in */*) mkdir -p "$t/${4%/*}" || exit 1 ;; esac
  ln "$q/$1" "$t/$4" 2>/dev/null || cp "$q/$1" "$t/$4" || exit 1
  chmod "$3" "$t/$4" || exit 1
  shift 4
done
if [ -e "$p" ] || [ -L "$p" ]; then
  mv -f "$p" "$o" || exit 1
  mv "$t" "$p" || exit 1
  rm -rf "$o"
else
  mv "$t" "$p" || exit 1
fi
"""
)
"""$1: the folder. Standard input: a tar.gz; tar and gzip fail if it is cut short. $2: a folder of parts, then four
parameters for each file that is there: its part, SHA-256, mode and path below the folder."""

PARTS = (
    _PLACE
    + r"""
umask 077
mkdir -p "$p" && cd "$p" || exit 1
shift
for part; do if [ -f "$part" ]; then echo "$part $(($(wc -c <"$part")))"; fi; done
"""
)
"""$1: the folder of parts. $2...: parts. Prints `PART BYTES` for each that is there."""

APPEND = (
    _PLACE
    + r"""
if [ "$2" = 0 ]; then : >"$p" || exit 1; fi
[ "$(wc -c <"$p")" -eq "$2" ] || fail "another upload has changed it"
exec cat >>"$p"
"""
)
"""$1: the part. $2: how many bytes of it are there. Standard input: the rest."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FENCED: Final = 76
"""The exit code of a program that a fence has ended."""
_FENCE_MARK: Final = "@fence "
_COMPARE: Final = r"""
_fence() { _line=; { IFS= read -r _line <"$1"; } 2>/dev/null; [ "$_line" = "$2" ]; }
"""


@dataclass(frozen=True, slots=True)
class Fence:
    """A file that a program compares before anything else, in the same shell: it runs only while the first line is
    this one. lost: the error otherwise, from the line that is there; "" without any. unless_gone: a folder without
    which there is nothing to compare."""

    path: str
    line: str
    lost: Callable[[str], DisaggError]
    unless_gone: str = ""

    def check(self, number: int) -> str:
        """The shell commands. A file that is not there may be on its way back: they look again."""
        compare = f"_fence {shlex.quote(self.path)} {shlex.quote(self.line)}"
        gone = f"[ ! -e {shlex.quote(self.unless_gone)} ] || " if self.unless_gone else ""
        again = f'{{ [ -z "$_line" ] && sleep 1 && {compare}; }}'
        ended = f"{{ printf '%s\\n' '{_FENCE_MARK}{number}' \"$_line\" >&2; exit {FENCED}; }}"
        return f"{gone}{compare} || {again} || {ended}"


def fenced(fences: Sequence[Fence], code: int, stderr: str) -> DisaggError | None:
    """The error if one of these fences has ended a program with this exit code and this output."""
    mark, _, found = stderr.partition("\n")
    if code != FENCED or not mark.startswith(_FENCE_MARK):
        return None
    return fences[int(mark.removeprefix(_FENCE_MARK))].lost(found.strip())


def program(
    argv: Sequence[str],
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    takes_input: bool = False,
    fences: Sequence[Fence] = (),
) -> bytes:
    """The input of BOOTSTRAP: fences, environment, then the script with argv as $1, $2, ..., or argv as a command."""
    for text in (*argv, *(environment or {}).values()):
        if "\0" in text:
            raise FleetError(
                "an argument or environment value contains a NUL character", "remove it: no command accepts one"
            )
    lines = [_COMPARE, *(fence.check(number) for number, fence in enumerate(fences))] if fences else []
    lines += [f"export {_name(key)}={shlex.quote(value)}" for key, value in sorted((environment or {}).items())]
    lines.append("cd 2>/dev/null")  # home: a forced command or a container may start elsewhere
    words = " ".join(map(shlex.quote, argv))
    if not takes_input:
        lines.append("exec </dev/null")
    if script is None:
        # Not exec: the waiting shell turns "killed by signal 9" into exit code 137; SSH has no exit code for it.
        lines.append(f"{words}; exit $?")
    else:
        lines += [f"set -- {words}", script]
    body = "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n"
    return b"%s\n%s" % (b"%d" % len(body) if takes_input else b"all", body)


def _name(key: str) -> str:
    if not _VARIABLE.fullmatch(key):
        raise FleetError(f"{key!r} is not a valid name of an environment variable", "use letters, digits and _ only")
    return key
