"""A host to deploy to: this machine with another HOME, through the same scripts that reach any other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from disagg.config import Fleet, Host, load
from disagg.fleet.deploy.deployment import Deployment, DeployResult, planner
from disagg.fleet.deploy.release import Installation
from disagg.fleet.deploy.requirements import PackageRequirements
from disagg.fleet.facts.host import HostFacts, read_host_facts
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import CommandResult, Invocation, Machine, script
from tests.programs import fake_uv

T = TypeVar("T")
STEPS = ("prepare", "environment", "adopt", "check_release", "install_daemons", "tidy", "uninstall")
STEP_SCRIPTS = {script("move_links.sh"), *(script(f"{name}.sh") for name in STEPS)}
TOKEN = "a-token-for-tests-only"
FLEET = """\
[fleet]
name = "lab"

[deploy]
installer = "uv"

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
    "disagg/tls/__init__.py": b"",
    "disagg/servers/__main__.py": b"VALUE = 1\n",
}
"""Stands for disagg where its size would only slow a test down."""


@dataclass
class Site:
    """A fleet of one host, whose home is $HOME. `changes`: of the text of its hosts.toml."""

    folder: Path
    token: str = TOKEN
    package: dict[str, bytes] = field(default_factory=lambda: dict(PACKAGE))
    changes: Mapping[str, str] = field(default_factory=dict)
    declared: tuple[str, ...] = ("anyio>=4",)
    replace_token: bool = False

    def __post_init__(self) -> None:
        weights = self.folder / "fleet" / "weights"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "config.json").write_text("{}")
        fake_uv(self.home / ".local/bin/uv", sys.executable)

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
        text = FLEET
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
    def here(self) -> Installation:
        return Installation(self.fleet, self.package, PackageRequirements(self.declared, ""), (self.token,))

    def fleet_on_host(self) -> Fleet:
        """What the current release's own hosts.toml says."""
        return load(self.own / "current" / "hosts.toml")

    def facts(self) -> HostFacts:
        machine = LocalMachine("spark")
        return read_host_facts(machine, self.host)

    def deployment(self, connect: Callable[[Host], Machine] = lambda host: LocalMachine(host.name)) -> Deployment:
        return Deployment([self.host], planner(self.here, self.replace_token), "deploy", connect=connect)

    def deploy(self, machine: Machine | None = None, break_lock: bool = False) -> DeployResult:
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


class Saboteur(Machine):
    """A machine that counts what changes it, and breaks at one of these: before it is carried out, or after."""

    def __init__(self, inner: Machine, at: int = 0, after: bool = False, error: BaseException | None = None) -> None:
        self.inner, self.at, self.after, self.error = inner, at, after, error
        self.trees: list[str] = []
        self.changes = 0

    @property
    def name(self) -> str:
        return self.inner.name

    def execute(self, invocation: Invocation) -> int:
        return self.inner.execute(invocation)

    def close(self) -> None:
        self.inner.close()

    def run(self, argv: Sequence[str], **options: Any) -> CommandResult:
        if options.get("script") not in STEP_SCRIPTS:
            return super().run(argv, **options)
        return self._change(lambda: super(Saboteur, self).run(argv, **options))

    def send(self, shown: tuple[str, ...], *arguments: Any, **options: Any) -> None:
        self._change(lambda: super(Saboteur, self).send(shown, *arguments, **options))
        if shown[0] == "put_tree":
            self.trees.append(shown[1])

    def _change(self, action: Callable[[], T]) -> T:
        self.changes += 1
        error = self.error if self.changes == self.at else None
        if error and not self.after:
            raise error
        result = action()
        if error:
            raise error
        return result
