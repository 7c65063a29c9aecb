"""What a machine is and has: one probe, one round trip, one value."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Final

from disagg import nvidia
from disagg.config import Host
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.probe import ProbeOutput, kib, number, run_probe
from disagg.fleet.facts.server import InstalledServer, installed
from disagg.fleet.machine.machine import Machine, script
from disagg.nvidia import GPU

_TIMEOUT_S: Final = 60.0
_CLOCK_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter. version: (3, 12, 3). makes_venvs: has venv and ensurepip. configured: named in hosts.toml."""

    path: str
    version: tuple[int, int, int]
    makes_venvs: bool = True
    configured: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """A release folder of any host on the machine, and the environment that it runs in."""

    host: str
    hash: str
    environment: str


@dataclass(frozen=True, slots=True)
class Systemd:
    """usable: the user's service manager responds. linger: it runs without the user being logged in."""

    version: int
    usable: bool
    linger: bool


@dataclass(frozen=True, slots=True)
class InstalledService:
    """An installed service definition. digest: SHA-256 of the file."""

    digest: str
    enabled: bool


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """Sizes in bytes; None if the machine does not report them.

    available: memory that can be allocated. wired_limit: GPU memory limit of macOS in MiB, 0 for its default. rdma:
    state of RDMA over Thunderbolt. smi: path of nvidia-smi. smi_failed: why nvidia-smi failed. devices: NVIDIA devices
    in /dev and on the PCI bus, which exist without a driver too.
    """

    memory: int | None = None
    available: int | None = None
    wired_limit: int | None = None
    rdma: str = ""
    smi: str = ""
    smi_failed: str = ""
    gpus: tuple[GPU, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostFacts(InstalledServer):
    """Facts about one host, its machine and its server. Sizes in bytes, None if the machine does not report them."""

    host: str
    os: str = "Linux"  # Linux | Darwin
    arch: str = ""
    user: str = ""
    uid: int = 0
    os_version: str = ""  # of glibc on Linux, of macOS on Darwin
    home: str = ""
    writable: bool = True
    disk_free: int | None = None
    hardware: HardwareFacts = field(default_factory=HardwareFacts)
    pythons: tuple[Python, ...] = ()
    no_python: str = ""  # the configured python, if it does not run
    uv: str = ""
    systemd: Systemd | None = None
    launchd: bool = False
    sudo: bool = False  # without a password; checked on macOS only
    installed: dict[str, InstalledService] = field(default_factory=dict)  # by manager: systemd, launchd:<name>, process
    releases: tuple[Release, ...] = ()
    sent: dict[str, int] = field(default_factory=dict)  # own releases -> when they arrived, seconds since 1970
    lists: dict[str, str] = field(default_factory=dict)  # own releases with a list of models -> its SHA-256
    damaged: frozenset[str] = frozenset()  # own releases whose content does not match their name
    before_tls: frozenset[str] = frozenset()  # own releases whose servers speak plain HTTP
    environments: dict[str, bool] = field(default_factory=dict)  # hash -> complete
    carried: tuple[str, ...] = ()  # folders of models that came with a deployment
    folder: bool = False  # whether anything was ever deployed
    others_deploy: bool = False  # a command changes another host of the same machine now
    leftovers: tuple[str, ...] = ()  # files of broken-off deployments
    uploads: dict[str, int] = field(default_factory=dict)  # parts of large files, from uploads that broke off -> size
    version: str = ""  # of disagg in the current release
    code: str = ""  # hash of the current release's code
    config: str = ""  # hash of its settings
    last_command: str = ""  # that starts or stops servers, by the audit
    cut_off: bool = False  # it has not ended, or runs now
    errno_65: int = 0  # lines with that error at the end of the server's log
    listening: tuple[int, ...] = ()

    @property
    def paths(self) -> HostPaths:
        return HostPaths(self.home, self.host)

    @property
    def sys_platform(self) -> str:
        """What Python's `sys.platform` is there."""
        return "darwin" if self.os == "Darwin" else "linux"

    @cached_property
    def own_releases(self) -> frozenset[str]:
        """Hashes of this host's releases."""
        return frozenset(release.hash for release in self.releases if release.host == self.host)

    @property
    def intact_releases(self) -> frozenset[str]:
        """Hashes of this host's releases whose files are intact."""
        return self.own_releases - self.damaged

    def environment_of(self, release: str) -> str:
        """The environment that one of this host's releases runs in, "" if unknown."""
        return next((r.environment for r in self.releases if (r.host, r.hash) == (self.host, release)), "")


def read_host_facts(machine: Machine, host: Host) -> HostFacts:
    """The facts of a host. Raises HostUnreachable, or FleetError if the probe fails."""
    ports = [str(port) for port in (host.port, host.kv_port) if port is not None]
    argv = [host.name, host.python or "", *ports]
    environment = {"NVIDIA_SMI_ARGUMENTS": " ".join(nvidia.ARGUMENTS)}
    return parse(host.name, run_probe(machine, "host.sh", argv, environment=environment, timeout=_TIMEOUT_S))


def parse(host: str, probe: ProbeOutput) -> HostFacts:
    """The facts in what the probe printed. A missing line leaves the default."""
    os, arch, user, uid = probe.first("machine", 4)
    home, writable = probe.first("home", 2)
    return HostFacts(
        host=host,
        os=os,
        arch=arch,
        user=user,
        uid=number(uid) or 0,
        os_version=probe.text("os_version"),
        home=home,
        writable=writable == "1",
        disk_free=kib(probe.text("disk")),
        hardware=parse_hardware(probe),
        pythons=tuple(filter(None, map(_python, probe.all("python", 4)))),
        no_python=probe.text("no_python"),
        uv=probe.text("uv"),
        systemd=next(map(_systemd, probe.all("systemd", 3)), None),
        launchd=probe.has("launchd"),
        sudo=probe.text("launchd") == "1",
        installed={name: InstalledService(digest, on == "1") for name, digest, on in probe.all("installed", 3)},
        releases=tuple(Release(*fields) for fields in probe.all("release", 3)),
        sent={name: number(at) or 0 for name, at in probe.all("sent", 2)},
        lists={fields[0]: fields[1] for fields in probe.all("list", 2)},
        damaged=frozenset(name for (name,) in probe.all("damaged", 1)),
        before_tls=frozenset(name for (name,) in probe.all("before_tls", 1)),
        environments={name: complete == "1" for name, complete in probe.all("environment", 2)},
        carried=tuple(name for (name,) in probe.all("carried", 1)),
        folder=probe.has("deployed"),
        others_deploy=probe.has("others_deploy"),
        leftovers=tuple(name for (name,) in probe.all("leftover", 1)),
        uploads={part: number(size) or 0 for part, size in probe.all("upload", 2)},
        version=probe.text("version"),
        code=probe.first("digests", 2)[0],
        config=probe.first("digests", 2)[1],
        last_command=probe.first("last", 2)[0],
        cut_off=probe.has("last") and probe.first("last", 2)[1] == "",
        errno_65=number(probe.text("errno_65")) or 0,
        listening=tuple(_numbers(port for (port,) in probe.all("listening", 1))),
        **asdict(installed(probe)),
    )


def parse_hardware(probe: ProbeOutput) -> HardwareFacts:
    """The hardware in what the host probe printed."""
    code, reason = probe.first("smi_failed", 2)
    return HardwareFacts(
        memory=kib(probe.text("memory")) or None,
        available=kib(probe.text("available")),
        wired_limit=number(probe.text("wired_limit")),
        rdma=probe.text("rdma"),
        smi=probe.text("smi"),
        smi_failed=(reason.strip() or f"exit code {code}") if code else "",
        gpus=nvidia.parse("\n".join(line for (line,) in probe.all("gpu", 1))),
        devices=tuple(device for (device,) in probe.all("device", 1)),
    )


def _python(fields: Sequence[str]) -> Python | None:
    configured, version, makes_venvs, path = fields
    numbers = _numbers(version.split("."))
    if len(numbers) != 3:
        return None
    return Python(path, (numbers[0], numbers[1], numbers[2]), makes_venvs == "1", configured == "1")


def _systemd(fields: Sequence[str]) -> Systemd:
    version, usable, linger = fields
    return Systemd(number(version) or 0, usable == "1", linger == "1")


def _numbers(texts: Iterable[str]) -> list[int]:
    return [value for value in map(number, texts) if value is not None]


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a machine's clock is ahead of this one's, in seconds, +- `error`."""

    ahead: float
    error: float


def read_clock(machine: Machine, python: str | None) -> Clock | None:
    """Compare a machine's clock with this one's: it is read in the middle of the round trip, +- half of it.

    The best of a few tries; None if the machine has neither `python` nor perl to read fractions of a second.
    """
    best: Clock | None = None
    for _ in range(_CLOCK_TRIES):
        before, began = time.time(), time.monotonic()
        result = machine.run([python or ""], script=script("clock.sh"), timeout=15.0)
        took = time.monotonic() - began
        try:
            there = float(result.stdout.strip())
        except ValueError:
            return None
        if best is None or took / 2 < best.error:
            best = Clock(there - (before + took / 2), took / 2)
    return best
