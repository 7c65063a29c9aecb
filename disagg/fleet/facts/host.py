"""What a machine is and has: one probe, one round trip, one frozen value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.facts.layout import Layout
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.output import last_lines

PROBE = Path(__file__).with_name("host.sh")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter. `version`: (3, 12, 3). `makes_venvs`: has venv and ensurepip. `configured`: hosts.toml's own."""

    path: str
    version: tuple[int, int, int]
    makes_venvs: bool = True
    configured: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """A release folder of any of the fleet's hosts on the machine, and which environment it runs in."""

    host: str
    hash: str
    environment: str


@dataclass(frozen=True, slots=True)
class Systemd:
    """`usable`: the user's own service manager answers. `linger`: it runs without the user being logged in."""

    version: int
    usable: bool
    linger: bool


@dataclass(frozen=True, slots=True)
class Serving:
    """The server process started last."""

    pid: int
    release: str
    alive: bool


@dataclass(frozen=True, slots=True)
class Installed:
    """A service definition where its manager looks for it. `digest`: SHA-256 of the file."""

    digest: str
    enabled: bool


@dataclass(frozen=True)
class HostFacts:
    """One machine as one host of the fleet sees it. Sizes in bytes, None where the machine does not tell."""

    host: str
    os: str = "Linux"  # Linux | Darwin
    arch: str = ""
    user: str = ""
    uid: int = 0
    os_version: str = ""  # of glibc on Linux, of macOS on Darwin
    home: str = ""
    writable: bool = True
    disk_free: int | None = None
    memory: int | None = None
    gpus: tuple[tuple[str, str], ...] = ()  # name, driver
    pythons: tuple[Python, ...] = ()
    no_python: str = ""  # the configured python, where it does not run
    uv: str = ""
    systemd: Systemd | None = None
    launchd: bool = False
    sudo: bool = False  # without a password; looked at on macOS only
    installed: dict[str, Installed] = field(default_factory=dict)  # by manager: systemd, launchd:<name>, process
    current: str = ""
    previous: str = ""
    releases: tuple[Release, ...] = ()
    damaged: frozenset[str] = frozenset()  # own releases whose files are not what their name says
    environments: dict[str, bool] = field(default_factory=dict)  # hash -> complete
    carried: tuple[str, ...] = ()
    token_digest: str = ""
    token_mode: str = ""
    folder: bool = False  # whether anything was ever deployed
    others_deploy: bool = False  # another host of the same machine is being deployed now
    leftovers: tuple[str, ...] = ()
    serving: Serving | None = None
    listening: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout(self.home, self.host)

    @property
    def sys_platform(self) -> str:
        """As Python names it."""
        return "darwin" if self.os == "Darwin" else "linux"

    @cached_property
    def own_releases(self) -> frozenset[str]:
        """Hashes of this host's releases."""
        return frozenset(release.hash for release in self.releases if release.host == self.host)

    @property
    def whole_releases(self) -> frozenset[str]:
        """Of these, those whose files are what they should be."""
        return self.own_releases - self.damaged

    def environment_of(self, release: str) -> str:
        """The environment that one of this host's releases runs in."""
        return next((r.environment for r in self.releases if (r.host, r.hash) == (self.host, release)), "")


def read_host_facts(machine: Machine, host: Host) -> HostFacts:
    """The facts of a host. HostUnreachable where the machine does not answer, FleetError where the probe fails."""
    ports = [str(port) for port in (host.port, host.kv_port) if port is not None]
    script = PROBE.read_text(encoding="utf-8")
    result = machine.run([host.name, host.python or "", *ports], script=script, timeout=_TIMEOUT_S)
    if not result.ok:
        words = last_lines(result.stderr or result.stdout, 3) or f"exit code {result.code}"
        raise FleetError(f"{host.name}: its facts cannot be read: {words}", f"disagg ssh {host.name}")
    return parse(host.name, result.stdout)


def parse(host: str, text: str) -> HostFacts:
    """The facts in what the probe printed. FleetError if it did not reach its end."""
    lines = [line.split("\t") for line in text.splitlines()]
    if ["end"] not in lines:
        raise FleetError(
            f"{host}: its facts cannot be read: the probe ended early",
            "a login script on that machine may print or exit: look at its ~/.profile, ~/.bashrc, ~/.zshenv",
        )
    return _Reading(lines).facts(host)


class _Reading:
    """The probe's lines by kind. A line that a later probe adds is ignored; a missing one leaves the default."""

    def __init__(self, lines: Sequence[Sequence[str]]) -> None:
        self._lines = lines

    def every(self, kind: str, width: int) -> Iterator[Sequence[str]]:
        """The fields of all lines of a kind that have so many."""
        return (line[1 : width + 1] for line in self._lines if line[0] == kind and len(line) > width)

    def first(self, kind: str, width: int) -> Sequence[str]:
        return next(self.every(kind, width), [""] * width)

    def facts(self, host: str) -> HostFacts:
        os, arch, user, uid = self.first("machine", 4)
        home, writable = self.first("home", 2)
        token_digest, token_mode = self.first("token", 2)
        return HostFacts(
            host=host,
            os=os,
            arch=arch,
            user=user,
            uid=_int(uid) or 0,
            os_version=self.first("os_version", 1)[0],
            home=home,
            writable=writable == "1",
            disk_free=_kib(self.first("disk", 1)[0]),
            memory=_kib(self.first("memory", 1)[0]) or None,
            gpus=tuple((name, driver) for name, driver in self.every("gpu", 2)),
            pythons=tuple(filter(None, map(_python, self.every("python", 4)))),
            no_python=self.first("no_python", 1)[0],
            uv=self.first("uv", 1)[0],
            systemd=next(map(_systemd, self.every("systemd", 3)), None),
            launchd=any(True for _ in self.every("launchd", 1)),
            sudo=self.first("launchd", 1)[0] == "1",
            installed={name: Installed(digest, on == "1") for name, digest, on in self.every("installed", 3)},
            current=self.first("current", 1)[0],
            previous=self.first("previous", 1)[0],
            releases=tuple(Release(*fields) for fields in self.every("release", 3)),
            damaged=frozenset(name for (name,) in self.every("damaged", 1)),
            environments={name: complete == "1" for name, complete in self.every("environment", 2)},
            carried=tuple(name for (name,) in self.every("carried", 1)),
            token_digest=token_digest,
            token_mode=token_mode,
            folder=any(True for _ in self.every("deployed", 1)),
            others_deploy=any(True for _ in self.every("others_deploy", 1)),
            leftovers=tuple(name for (name,) in self.every("leftover", 1)),
            serving=next(map(_serving, self.every("serving", 3)), None),
            listening=tuple(_ints(port for (port,) in self.every("listening", 1))),
        )


def _python(fields: Sequence[str]) -> Python | None:
    configured, version, makes_venvs, path = fields
    numbers = _ints(version.split("."))
    if len(numbers) != 3:
        return None
    return Python(path, (numbers[0], numbers[1], numbers[2]), makes_venvs == "1", configured == "1")


def _systemd(fields: Sequence[str]) -> Systemd:
    version, usable, linger = fields
    return Systemd(_int(version) or 0, usable == "1", linger == "1")


def _serving(fields: Sequence[str]) -> Serving:
    pid, release, alive = fields
    return Serving(_int(pid) or 0, release, alive == "1")


def _int(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _ints(texts: Iterator[str] | Sequence[str]) -> list[int]:
    return [number for number in map(_int, texts) if number is not None]


def _kib(text: str) -> int | None:
    number = _int(text)
    return None if number is None else number << 10
