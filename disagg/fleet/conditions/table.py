"""The conditions that a host must meet for its engine, and what it does not meet. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from disagg.config import Deploy, Fleet, Host
from disagg.config.addresses import same_machine
from disagg.config.tables.agree import require_all_nodes
from disagg.errors import ConfigError
from disagg.extras import DISK_BYTES
from disagg.fleet.conditions import memory
from disagg.fleet.conditions.memory import Fit
from disagg.fleet.facts.findings import Finding, fault, note, ok, warning
from disagg.fleet.facts.host import HostFacts, Python
from disagg.nvidia import GPU, OLDEST_DRIVER
from disagg.planning.sizing import local_config
from disagg.planning.verdicts import verdict
from disagg.units import counted, size
from disagg.version import OLDEST_PYTHON

RELEASE_BYTES: Final = 64 << 20
_BESIDE_SITE_PACKAGES: Final = 1 << 30
"""Disk that an environment needs if most of its packages are the host's own."""
PREFERRED: Final = ((3, 12), (3, 13), (3, 11), (3, 14))


@dataclass(frozen=True, slots=True)
class Subject:
    """A host and what is known of it. files: config.json and bytes of its models' files there, by the model's name;
    without them, what is known of the source. disk: bytes that a deployment needs, 0 if that is judged elsewhere."""

    fleet: Fleet
    host: Host
    facts: HostFacts
    files: Mapping[str, tuple[Mapping[str, Any], int]] = field(default_factory=dict)
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. unmet: findings about what is missing, none if it is met. refuses: a host that does not meet it is
    not deployed to; else its plan notes that. A warning never refuses."""

    name: str
    unmet: Callable[[Subject], Iterable[Finding]]
    refuses: bool = True


def fits(one: Subject, host: Host | None = None) -> list[Fit]:
    """What each model of the host needs, and the room there is, as far as that is known. host: another one of the same
    machine."""
    found = []
    for served in one.fleet.run_by(host or one.host):
        config, nbytes = one.files.get(served.model, (None, None)) if host is None else (None, None)
        model = one.fleet.models[served.model]
        found.append(memory.fit(served, model, one.facts.hardware, one.facts.os, config=config, nbytes=nbytes))
    return [one for one in found if one is not None]


def _memory(one: Subject) -> Iterator[Finding]:
    """Each model alone, then what is loaded together."""
    found = fits(one)
    for each in found:
        yield from memory.unmet(each)
    place = same_machine(one.host.address)
    beside = [host for host in one.fleet.hosts.values() if host.name != one.host.name and not host.whole]
    here = [host for host in beside if same_machine(host.address) == place]
    others = [other for host in here for other in memory.loaded_at_start(fits(one, host))]
    yield from memory.unmet_together(found, others)


def _verdicts(one: Subject) -> Iterator[Finding]:
    for served in one.fleet.run_by(one.host):
        yield from model_verdict(one.fleet, served, one.files.get(served.model, ({}, 0))[0])


CONDITIONS: Final = (
    Condition("system", lambda one: system(one.facts)),
    Condition("engine", lambda one: engine(one.host, one.facts)),
    Condition("disk", lambda one: disk(one.host, one.facts, one.disk)),
    Condition("service", lambda one: service(one.host, one.facts)),
    Condition("driver", lambda one: driver(one.host, one.facts), refuses=False),
    Condition("cards", lambda one: cards(one.host, one.facts)),
    Condition("nodes", lambda one: nodes(one.fleet, one.host)),
    Condition("python", lambda one: unmet_python(one.host, one.fleet.deploy, one.facts)),
    Condition("memory", _memory),
    Condition("verdict", _verdicts),
)


def unmet(subject: Subject) -> list[Finding]:
    """All that the host does not meet."""
    return [one for condition in CONDITIONS for one in condition.unmet(subject)]


def judged(subject: Subject) -> tuple[list[Finding], list[Finding]]:
    """What a deployment refuses the host for, and what it is deployed without."""
    refused: list[Finding] = []
    noted: list[Finding] = []
    for condition in CONDITIONS:
        for one in condition.unmet(subject):
            (refused if condition.refuses and one.level == "fault" else noted).append(one)
    return refused, noted


# The machine


def system(facts: HostFacts) -> Iterator[Finding]:
    if facts.os not in ("Linux", "Darwin"):
        yield fault("system", f"{facts.os or 'its system'} is neither Linux nor macOS", "disagg serves on those two")
    elif not facts.home.startswith("/") or re.search(r"[\x00-\x1f\x7f:]", facts.home):
        text = f"the home folder {facts.home!r} contains characters that PATH cannot hold"
        yield fault("system", text, "use another account")


def engine(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """Whether the engine, and the device that it is told to use, exist on this system."""
    if facts.os not in ("Linux", "Darwin"):
        return
    mac, device, kind = facts.os == "Darwin", host.engine.device, host.engine.kind
    line = f"engine.device of [hosts.{host.name}]"
    if kind.apple_silicon and mac and facts.arch != "arm64":
        text = f"{kind.title} needs a Mac with Apple silicon, and this one has an Intel processor"
        yield fault("engine", text, "decode elsewhere")
    if device == "gpu" and not mac:
        yield fault("engine", f"{kind.title} reaches no GPU on Linux", f'{line}: "cpu", or decode on a Mac')
    if facts.os not in kind.systems:
        yield fault("engine", f"{kind.title} runs on Linux", "prefill on a machine with an NVIDIA GPU")
    if device.startswith("cuda") and mac:
        hint = f'{line}: "mps" or "cpu", or prefill on a machine with an NVIDIA GPU'
        yield fault("engine", "macOS has no CUDA", hint)
    if device == "mps" and not mac:
        yield fault("engine", "Linux has no mps device", f'{line}: "cuda" or "cpu"')


def uses_cuda(host: Host, facts: HostFacts) -> bool:
    """Whether the engine computes on NVIDIA's cards if there are any."""
    return facts.os == "Linux" and "cuda" in host.engine.kind.devices and host.engine.device != "cpu"


def driver(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """Whether NVIDIA's driver is there, works, and is new enough."""
    hardware, device = facts.hardware, host.engine.device
    if not uses_cuda(host, facts):
        return
    package = f'disagg ssh {host.name} -- "sudo apt install nvidia-driver-{OLDEST_DRIVER}-open"'
    install = f"{package}; then restart the machine"
    if not hardware.smi:
        told = f'engine.device is "{device}", and there is no'
        if hardware.devices or device.startswith("cuda"):
            what = "there is an NVIDIA card and no" if hardware.devices else told
            yield fault("gpu", f"{what} driver: nvidia-smi is missing", install)
    elif hardware.smi_failed or not hardware.gpus:
        reload = f"restart the machine; if it stays: {package}"
        yield fault("gpu", f"nvidia-smi: {hardware.smi_failed or 'finds no card'}", reload)
    for card in hardware.gpus if hardware.smi else ():
        if _driver_of(card) < OLDEST_DRIVER:
            text = f"driver {card.driver} of {card.name} is older than {OLDEST_DRIVER}, which CUDA 13 needs"
            yield fault("gpu", text, install)


def cards(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """Whether there are as many cards as ranks, which vLLM finds out after the deploy."""
    ranks, there = host.engine.ranks_here, len(facts.hardware.gpus)
    if 0 < there < ranks and uses_cuda(host, facts):
        of = f" on {host.engine.nnodes} nodes" if host.engine.nnodes > 1 else ""
        options = "tensor_parallel" if host.engine.pipeline_parallel == 1 else "tensor_parallel * pipeline_parallel"
        yield fault(
            "gpu",
            f"{options} of {host.name} is {host.engine.ranks}{of}, and the machine has {counted(there, 'GPU')}",
            f"{options} = {there * host.engine.nnodes} in [hosts.{host.name}.engine]: each rank takes a GPU of its own",
        )


def nodes(fleet: Fleet, host: Host) -> Iterator[Finding]:
    """Whether each node that the host would wait for is a host of hosts.toml."""
    try:
        require_all_nodes(fleet, host)
    except ConfigError as error:
        yield fault("nodes", error.message, error.hint)


def disk(host: Host, facts: HostFacts, needed: int) -> Iterator[Finding]:
    """Whether the home can be written to and has so many bytes free."""
    if not facts.writable:
        mounted = f"mount it read-write (disagg exec --host {host.name} -- mount)"
        yield fault("disk", f"{facts.home} is read-only", f"{mounted}, or give {facts.user} a home it may write to")
    elif facts.disk_free is not None and needed > facts.disk_free:
        text = f"{facts.home} has {size(facts.disk_free)} free, and this needs about {size(needed)}"
        yield fault("disk", text, f"make room, or see what is large: du -sh {facts.paths.root}/*")


def model_verdict(fleet: Fleet, host: Host, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the host's model can be handed over, as far as its config.json shows. config: of the files there; without
    it, of those here. Nothing if neither is known."""
    if host.gateway or host.simulated or not host.engine.kind.loads:
        return
    title = host.engine.kind.title
    config = config or local_config(fleet.models[host.model].sources.get(host.engine.name, ""))
    if not config:
        return
    found = verdict(config, host.engine, fleet.models[host.model].context)
    text = f"{host.model} ({found.model_type}) with {title}: {found}"
    if found.sure:
        yield fault("verdict", text, found.instead)
    elif found.state == "refused":
        yield warning("verdict", text, found.instead)
    else:
        yield note("verdict", text) if found.state == "unknown" else ok("verdict", text)


def environment_bytes(extras: tuple[str, ...], site_packages: bool) -> int:
    """Disk that an environment with these extras of disagg needs while it is built."""
    return _BESIDE_SITE_PACKAGES if site_packages else max((DISK_BYTES.get(extra, 0) for extra in extras), default=0)


def service(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """Whether the service manager that hosts.toml names runs there."""
    otherwise = f'service = "process" in [hosts.{host.name}]'
    if host.service == "launchd" and not facts.launchd:
        yield fault("service", "there is no launchd", otherwise)
    if host.service == "systemd":
        if facts.systemd is None:
            yield fault("service", "systemd does not run there", otherwise)
        elif facts.systemd.linger and not facts.systemd.usable:
            text = f"the user's systemd does not answer, though {facts.user} may linger"
            start = f"disagg ssh {host.name} -- sudo systemctl start user@{facts.uid}.service"
            yield fault("service", text, f"{start}; or {otherwise}")


def _driver_of(card: GPU) -> int:
    """The major version; a large one if nvidia-smi does not print it."""
    found = re.match(r"\d+", card.driver)
    return int(found[0]) if found else OLDEST_DRIVER


# Its Pythons


def unmet_python(host: Host, deploy: Deploy, facts: HostFacts) -> Iterator[Finding]:
    if isinstance(found := pythons(host, deploy, facts), Finding):
        yield found


def pythons(host: Host, deploy: Deploy, facts: HostFacts) -> list[Python | None] | Finding:
    """Usable interpreters, best first; None stands for one that uv downloads."""
    if deploy.installer == "uv" and not facts.uv:
        return fault("python", "there is no uv", 'install uv there, or set installer = "auto" in [deploy]')
    if host.python is not None:
        return _configured(host, facts)
    new = [python for python in facts.pythons if python.version[:2] >= OLDEST_PYTHON and not python.configured]
    by_uv = facts.uv and deploy.installer != "pip"
    usable = [python for python in new if python.makes_venvs or by_uv]
    usable.sort(key=lambda python: PREFERRED.index(v) if (v := python.version[:2]) in PREFERRED else len(PREFERRED))
    if usable:
        return [*usable]
    if by_uv:
        return [None]
    return _without_venv(host, new[0]) if new else _none(host, facts)


def _configured(host: Host, facts: HostFacts) -> list[Python | None] | Finding:
    own = next((python for python in facts.pythons if python.configured), None)
    if own is None:
        return fault("python", f"{facts.no_python or host.python} does not run there", "correct `python` in hosts.toml")
    if own.version[:2] < OLDEST_PYTHON:
        text = f"{own.path} is Python {dotted(own.version)}, and disagg needs {dotted(OLDEST_PYTHON)}"
        return fault("python", text, "name a newer one as `python` in hosts.toml")
    return [own] if own.makes_venvs else _without_venv(host, own)


def _without_venv(host: Host, python: Python) -> Finding:
    install = f'disagg ssh {host.name} -- "sudo apt install python{dotted(python.version[:2])}-venv"'
    return fault("python", f"{python.path} has no venv module", install)


def _none(host: Host, facts: HostFacts) -> Finding:
    install = "brew install python@3.12" if facts.os == "Darwin" else "sudo apt install python3 python3-venv"
    hint = f'disagg ssh {host.name} -- "{install}"; or uv, which downloads one: https://docs.astral.sh/uv'
    found = ", ".join(f"{python.path} is {dotted(python.version)}" for python in facts.pythons)
    if found:
        return fault("python", f"every Python there is older than {dotted(OLDEST_PYTHON)}: {found}", hint)
    return fault("python", f"there is no Python {dotted(OLDEST_PYTHON)} or newer", hint)


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
