"""The test bed as a fleet that is operated as people do: with the `disagg` command, from a machine of its own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import disagg
from tests import preloaded
from tests.preloaded import Preloaded
from tests.testbed.bed import Bed
from tests.testbed.uv import install_uv

ROOT = str(Path(disagg.__file__).parents[1])


@dataclass(frozen=True)
class Operator:
    """Whoever runs `disagg` against the bed. `config`: the hosts.toml in use. `code`: the folder that disagg is in."""

    bed: Bed
    config: Path
    folder: Path
    code: str = ROOT

    @property
    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": self.code, "XDG_STATE_HOME": str(self.folder / "state"), "COLUMNS": "80", "NO_COLOR": "1"}
        own["PYTHONFAULTHANDLER"] = "1"  # a crash of the interpreter has a traceback
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DISAGG_", "FORCE_COLOR"))}
        return {**kept, **own, "HOME": str(self.bed.home)}

    def argv(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "disagg", "--config", str(self.config), *map(str, arguments)]

    def run(self, *arguments: object, code: int = 0, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `disagg ARGUMENTS`, which must end with this code."""
        argv = self.argv(*arguments)
        if preloaded.AVAILABLE and self.code == ROOT and self.bed.hub is not None:
            done = self._forked(argv[3:], timeout)
        else:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=timeout,
                env=self.environment,
                cwd=self.code,
                check=False,
            )
        assert done.returncode == code, f"disagg {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def _forked(self, argv: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """In a process with disagg's modules imported, which takes half a second of CPU time less."""
        assert self.bed.hub is not None
        network = f"/proc/{self.bed.hub.pid}/ns/net"
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            process = disagg_process().start(argv, self.environment, out, network, program="disagg", errors=err)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())

    def status(self, code: int = 0, *arguments: object) -> dict[str, dict[str, Any]]:
        """`disagg status --json`, by host."""
        return {
            one["host"]: one for one in json.loads(self.run("status", "--json", *arguments, code=code).stdout)["hosts"]
        }


@cache
def disagg_process() -> Preloaded:
    """The process that forks command lines."""
    process = Preloaded(framework="disagg")
    atexit.register(process.close)
    return process


def operator(bed: Bed, folder: Path) -> Operator:
    """The bed's fleet with the demo models. Environments are made at once: what installs them has its own tests."""
    install_uv(bed)
    path = bed.write_hosts_toml(folder / "hosts.toml")
    path.write_text(f'[deploy]\ninstaller = "uv"\ncuda_on_cpu = true\n\n{path.read_text()}')
    return Operator(bed, path, folder)


@contextmanager
def edited(operator: Operator, *changes: tuple[str, str]) -> Iterator[None]:
    """Within, hosts.toml with these texts replaced."""
    before = operator.config.read_text()
    text = before
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    operator.config.write_text(text)
    try:
        yield
    finally:
        operator.config.write_text(before)
