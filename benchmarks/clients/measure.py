"""One client in front of the fleet: its program, and what that reports of each feature."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.clients.environments import NotInstalled, install, python, version
from benchmarks.clients.table import MeasuredClient
from disagg.api.base import Contract
from disagg.demo.flow import HOSTS_FILE

PROGRAMS: Final = Path(__file__).with_name("programs")
TASKS: Final = Path(__file__).with_name("tasks")
"""Those of lm-evaluation-harness."""
MODEL: Final = HOSTS_FILE.parent / "models" / "qwen3-moe-tiny"
"""Whose tokenizer clients need that make prompts themselves."""
NOWHERE: Final = "http://127.0.0.1:9"
"""A proxy that refuses."""
OFFLINE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONWARNINGS": "ignore",
}


class Feature(Contract, frozen=True):
    """What came of one feature. note: why it does not work."""

    feature: str
    works: bool
    note: str = ""


class Measured(Contract, frozen=True, kw_only=True):
    """What came of one client. problem: why it was not measured, or not to its end; empty if it was."""

    name: str
    version: str = ""
    seconds: float = 0.0
    features: tuple[Feature, ...] = ()
    problem: str = ""


def measured(client: MeasuredClient, cache: Path, url: str, model: str) -> Measured:
    """Install a client if it is not there, and run its program. url: of the gateway, without /v1."""
    try:
        folder = install(client, cache)
    except NotInstalled as error:
        return Measured(name=client.name, problem=f"not installed: {error}")
    home = cache / "homes" / client.name
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    lines, problem = _printed(client, folder, home, _variables(client, folder, home, url, model))
    features = tuple(Feature.from_json(json.loads(line)) for line in lines if line.startswith('{"feature"'))
    return Measured(
        name=client.name,
        version=version(client, folder),
        seconds=round(time.monotonic() - began, 1),
        features=features,
        problem=problem,
    )


def _variables(client: MeasuredClient, folder: Path, home: Path, url: str, model: str) -> dict[str, str]:
    given = {name: os.environ[name] for name in ("LANG", "TMPDIR", "TRACEBACKS", "SSL_CERT_FILE") if name in os.environ}
    path = f"{folder / 'bin'}:{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    folders = {"TASKS_FOLDER": str(TASKS), "MODEL_FOLDER": str(MODEL)}
    named = {
        **folders,
        "GATEWAY_URL": url,
        "GATEWAY_MODEL": model,
        "CLIENT_FOLDER": str(folder),
        "HOME": str(home),
        "PATH": path,
    }
    return {**given, **OFFLINE, **named, **client.variables}


def _printed(
    client: MeasuredClient, folder: Path, home: Path, variables: Mapping[str, str]
) -> tuple[Sequence[str], str]:
    """The lines on stdout, and why the program did not end well; empty if it did."""
    program = PROGRAMS / client.file
    command = ["node" if program.suffix == ".mjs" else str(python(folder)), str(program)]
    with (home / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    try:
        text, problem = process.communicate(timeout=client.limit_s)[0], ""
        if process.returncode:
            ending = (home / "stderr").read_text(errors="replace").strip().splitlines() or [""]
            problem = f"its program ended with {process.returncode}: {ending[-1][:200]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, problem = process.communicate()[0], f"not all features were tried within {client.limit_s:g} s"
    return text.splitlines(), problem
