"""Which peers are installed, and in which version."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version


def import_error(module: str) -> str | None:
    """Why this interpreter cannot import the module, None if it can. Tried in a new process, since a missing native
    part may crash it."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return next(iter(done.stderr.strip().splitlines()[-1:]), f"importing it ended with code {done.returncode}")


def package(*names: str) -> str:
    """The first of these packages that is installed, with its version."""
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"
