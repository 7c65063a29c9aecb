"""An environment for each client, made once and kept: pip's in a virtual environment, npm's in a folder."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.clients.table import MeasuredClient

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENT: Final = ROOT / "scripts" / "environment.py"
INSTALL_S: Final = 1200.0
VERSION: Final = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


class NotInstalled(Exception):
    """A client that cannot be installed; the message says why, in one line."""


def install(client: MeasuredClient, cache: Path) -> Path:
    """The environment of a client, made if it is not there. Raises NotInstalled."""
    folder = ROOT / ".venv-vllm" if client.kind == "vllm" else cache / client.name
    stamp = folder / ".ready"
    if stamp.exists():
        return folder
    if client.kind == "vllm":
        raise NotInstalled("there is no .venv-vllm: run `make vllm`")
    command = _npm(client, folder) if client.kind == "npm" else _pip(client, folder)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"its installation takes over {INSTALL_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise NotInstalled((lines or ["the installation failed"])[0].strip()[:200])
    stamp.touch()
    return folder


def version(client: MeasuredClient, folder: Path) -> str:
    """The installed version."""
    if client.kind == "npm":
        found = json.loads((folder / "node_modules" / client.package / "package.json").read_text(encoding="utf-8"))
        return str(found["version"])
    command = [str(python(folder)), "-c", VERSION, client.package]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def python(folder: Path) -> Path:
    """The interpreter of an environment; disagg's own if it has none."""
    own = folder / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def _pip(client: MeasuredClient, folder: Path) -> list[str]:
    command = [sys.executable, str(ENVIRONMENT), str(folder)]
    if client.torch:
        command += ["--sees", sys.prefix]
    torch = [f"torch=={importlib.metadata.version('torch')}"] if client.torch else []  # which is there already
    return [*command, "--", *torch, client.package, *client.beside]


def _npm(client: MeasuredClient, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{client.package}@latest"]
