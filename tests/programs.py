"""Programs of the system that some tests need, skipped where one is missing, and small programs that tests write."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PACKAGES: Final = {
    "cc": "gcc libc6-dev",
    "git": "git",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "pkill": "procps",
    "ps": "procps",
    "ss": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "sudo": "sudo",
    "tc": "iproute2",
}
"""Debian's packages. tests/testbed/requirements.sh brings them."""
UV: Final = """\
#!/bin/sh
case $1 in venv | pip) echo "$*" >>"$HOME/.local/uv.log" ;; esac
case $1 in
    --version) echo uv 0.0.0 ;;
    venv)
        for target; do :; done
        mkdir -p "$target/bin"
        printf '#!/bin/sh\\nexec "{python}" "$@"\\n' >"$target/bin/python"
        chmod 755 "$target/bin/python" ;;
    pip) if test -f "$HOME/no-index"; then echo 'error: no index answers' >&2; exit 2; fi ;;
esac
"""


def missing(*programs: str) -> str:
    """Why a test cannot run that needs these programs; "" if it can."""
    absent = [name for name in programs if shutil.which(name, path=PATH) is None]
    packages = sorted({PACKAGES[name] for name in absent})
    return f"needs {', '.join(absent)}: sudo apt-get install {' '.join(packages)}" if absent else ""


def need(*programs: str) -> None:
    """Skip the running test unless the programs are there."""
    if reason := missing(*programs):
        pytest.skip(reason)


def needs(*programs: str) -> pytest.MarkDecorator:
    """A mark for tests that need the programs."""
    reason = missing(*programs)
    return pytest.mark.skipif(bool(reason), reason=reason)


def python_program(path: Path, code: str) -> None:
    """Write a program that runs `code`. Its first lines are for sh: a path with a space cannot follow "#!"."""
    python = shlex.quote(sys.executable)
    path.write_text(f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n'''\n{code}")
    path.chmod(0o755)


def fake_uv(path: Path, python: str) -> None:
    """Write a program that stands for uv. An environment is there at once and runs this python; what is asked for is in
    ~/.local/uv.log. Installing fails, as without an index, if the home has a file `no-index`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(UV.replace("{python}", python))
    path.chmod(0o755)
