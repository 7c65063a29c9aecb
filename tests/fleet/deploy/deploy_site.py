"""A host to deploy to: this machine with another HOME, through the same scripts that reach any other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disagg.config import Fleet, Host, load
from disagg.fleet.deploy.deployment import Deployment, HostReport, deciding
from disagg.fleet.deploy.facts import Facts, gather
from disagg.fleet.deploy.release import Here
from disagg.fleet.deploy.requirements import needed
from disagg.fleet.local_machine import LocalMachine
from disagg.fleet.machine import Machine, Result

TOKEN = "a-token-for-tests-only"
FLEET = """\
[fleet]
name = "lab"

[models.tiny]
aliases = ["t"]
context = 2048
[models.tiny.sources]
transformers = "./weights"
mlx = "./weights"

[hosts.spark]
address = "127.0.0.1"
roles = ["prefill"]
model = "tiny"
port = 18321
service = "process"
python = "{python}"
site_packages = true

[hosts.spark.engine]
name = "transformers"
dtype = "float32"
device = "cpu"
threads = 1
"""
PACKAGE = {
    "disagg/__init__.py": b"",
    "disagg/config/__init__.py": b"class Fleet:\n    hosts = {'spark': 1}\ndef load(path):\n    return Fleet\n",
    "disagg/servers/__init__.py": b"",
    "disagg/servers/__main__.py": b"VALUE = 1\n",
}
"""Stands for disagg where its size would only slow a test down."""


@dataclass
class Site:
    """A fleet of one host, whose home is `home`. `small`: deploy PACKAGE instead of disagg."""

    folder: Path
    small: bool = True
    token: str = TOKEN
    package: dict[str, bytes] = field(default_factory=lambda: dict(PACKAGE))
    changes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = self.folder / "fleet" / "weights"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "config.json").write_text("{}")

    @property
    def home(self) -> Path:
        return Path(os.environ["HOME"])

    @property
    def root(self) -> Path:
        return self.home / ".disagg"

    @property
    def own(self) -> Path:
        return self.root / "hosts" / "spark"

    @property
    def fleet(self) -> Fleet:
        text = FLEET.replace("{python}", sys.executable)
        for old, new in self.changes.items():
            assert old in text, old
            text = text.replace(old, new)
        path = self.folder / "fleet" / "hosts.toml"
        path.write_text(text)
        return load(path)

    @property
    def host(self) -> Host:
        return self.fleet.hosts["spark"]

    @property
    def here(self) -> Here:
        here = Here.of(self.fleet, self.token)
        needs = replace(needed(), declared=("anyio>=4", "httpx>=0.28"))
        return replace(here, package=self.package, needs=needs) if self.small else here

    def facts(self) -> Facts:
        machine = LocalMachine("spark")
        return gather(machine, self.host)

    def deployment(self, connect: Callable[[Host], Machine] = lambda host: LocalMachine(host.name)) -> Deployment:
        return Deployment([self.host], deciding(self.here), "deploy", connect=connect)

    def deploy(self, machine: Machine | None = None, break_lock: bool = False) -> HostReport:
        connect = (lambda host: machine) if machine is not None else (lambda host: LocalMachine(host.name))
        with self.deployment(connect) as deployment:
            return deployment.carry_out(deployment.plan(), break_lock)[0]

    def current(self) -> str:
        """The current release; asserts that it is whole."""
        release = self.own / "current"
        assert (release / "run").is_file() and (release / "hosts.toml").is_file()
        environment = (release / "environment").read_text().strip()
        assert (self.root / "envs" / environment / ".complete").exists()
        return release.resolve().name


class Recorder:
    """A machine that remembers what it is asked to do, and may fail at one of these."""

    def __init__(self, inner: Machine, fail_at: int | None = None, error: BaseException | None = None) -> None:
        self.inner, self.fail_at, self.error = inner, fail_at, error
        self.trees: list[str] = []
        self.writes: list[str] = []
        self.sent = 0
        self.calls = 0

    @property
    def name(self) -> str:
        return self.inner.name

    def run(self, argv: Sequence[str], **options: Any) -> Result:
        return self.inner.run(argv, **options)

    def put_tree(self, files: Mapping[str, bytes | Path], target: str, *, timeout: float = 600.0) -> int:
        self.trees.append(target)
        sent = self.inner.put_tree(files, target, timeout=timeout)
        self.sent += sent
        return sent

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self.writes.append(path)
        self.inner.write(path, content, mode=mode)

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        return self.inner.read(path, limit=limit)

    def close(self) -> None:
        self.inner.close()
