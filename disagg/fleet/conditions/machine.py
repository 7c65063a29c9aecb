"""What a machine must have for a host: its system, device, driver, cards, disk and service manager. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import ConfigError
from disagg.extras import DISK_BYTES
from disagg.fleet.facts.findings import Finding, fault
from disagg.fleet.facts.host import HostFacts
from disagg.nvidia import GPU, OLDEST_DRIVER
from disagg.units import counted, size

RELEASE_BYTES: Final = 64 << 20
_BESIDE_SITE_PACKAGES: Final = 1 << 30
"""Disk that an environment needs if most of its packages are the host's own."""


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
        fleet.require_all_nodes(host)
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
