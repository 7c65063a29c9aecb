"""Why a host cannot have a release: its system, engine, service manager, disk. Pure: no I/O but the sizes of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from disagg.config import Host
from disagg.extras import DISK_BYTES
from disagg.fleet.deploy.release import TargetState
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.services.base import is_plain
from disagg.fleet.token.there import another
from disagg.units import size

_RELEASE_BYTES: Final = 64 << 20
LARGE_BYTES: Final = 1_000_000_000
"""Of packages for a host that computes on its CPU: MLX's are 0.1 GB, torch's with CUDA 2.9 GB."""


def refusals(host: Host, facts: HostFacts) -> tuple[Refusal, ...]:
    """Why this host cannot have any release."""
    return tuple(_refusals(host, facts))


def no_room(desired: TargetState, facts: HostFacts) -> Iterator[Refusal]:
    """A Refusal if the disk has too little room."""
    if facts.disk_free is None or facts.current == desired.hash:
        return
    need = _RELEASE_BYTES + sum(path.stat().st_size for path in _model_files(desired, facts))
    if not facts.environments.get(desired.environment.hash):
        wheels = sum(wheel.path.stat().st_size for wheel in desired.environment.wheels)
        build = max(DISK_BYTES.get(extra, 0) for extra in desired.environment.extras)
        need += wheels + (1 << 30 if desired.environment.site_packages else build)
    need -= sum(facts.uploads.values())  # parts that go on, and others, which are removed first
    if need > facts.disk_free:
        yield Refusal(
            f"{facts.home} has {size(facts.disk_free)} free, and this needs about {size(need)}",
            f"make room, or see what is large: du -sh {facts.paths.root}/*",
        )


def cuda_for_cpu(desired: TargetState, facts: HostFacts) -> Iterator[Refusal]:
    """A Refusal if CUDA's packages were downloaded for a host that computes on its CPU. Not if hosts.toml names a
    source that may have smaller ones."""
    wanted = desired.environment
    total = sum(one.nbytes for one in wanted.packages.values())
    chosen = wanted.site_packages or wanted.other_sources
    there = facts.environments.get(wanted.hash)
    if desired.host.engine.device == "cpu" and total >= LARGE_BYTES and not chosen and not there:
        yield Refusal(
            f'{total / 1e9:.2g} GB to download, most of it for CUDA, and engine.device is "cpu"',
            "in [deploy] of hosts.toml: extra_index_urls with an index of torch for CPUs, or cuda_on_cpu = true",
        )


def another_token(tokens: Sequence[str], facts: HostFacts) -> Iterator[Refusal]:
    """A Refusal if the host has tokens, and none of them is this machine's."""
    if (found := another(tokens, facts.token_digests, facts.host)) is not None:
        yield Refusal(*found)


def _refusals(host: Host, facts: HostFacts) -> Iterator[Refusal]:
    if facts.os not in ("Linux", "Darwin"):
        yield Refusal(f"{facts.os or 'its system'} is neither Linux nor macOS", "disagg serves on those two")
        return
    if not is_plain(facts.home) or ":" in facts.home or not facts.home.startswith("/"):
        yield Refusal(
            f"the home folder {facts.home!r} contains characters that PATH cannot hold", "use another account"
        )
    if not facts.writable:
        yield Refusal(f"{facts.home} is read-only", f"mount it read-write, or give {facts.user} a home it may write to")
    yield from _engine(host, facts)
    yield from _service(host, facts)


def _engine(host: Host, facts: HostFacts) -> Iterator[Refusal]:
    mac, device, engine = facts.os == "Darwin", host.engine.device, host.engine.kind
    line = f"engine.device of [hosts.{host.name}]"
    if engine.apple_silicon and mac and facts.arch != "arm64":
        cause = f"{engine.title} needs a Mac with Apple silicon, and this one has an Intel processor"
        yield Refusal(cause, "decode elsewhere")
    if device == "gpu" and not mac:
        yield Refusal(f"{engine.title} reaches no GPU on Linux", f'{line}: "cpu", or decode on a Mac')
    if facts.os not in engine.systems:
        yield Refusal(f"{engine.title} runs on Linux", "prefill on a machine with an NVIDIA GPU")
    if device.startswith("cuda") and mac:
        yield Refusal("macOS has no CUDA", f'{line}: "mps" or "cpu", or prefill on a machine with an NVIDIA GPU')
    if device == "mps" and not mac:
        yield Refusal("Linux has no mps device", f'{line}: "cuda" or "cpu"')


def _service(host: Host, facts: HostFacts) -> Iterator[Refusal]:
    otherwise = f'service = "process" in [hosts.{host.name}]'
    if host.service == "launchd" and not facts.launchd:
        yield Refusal("there is no launchd", otherwise)
    if host.service == "systemd":
        if facts.systemd is None:
            yield Refusal("systemd does not run there", otherwise)
        elif facts.systemd.linger and not facts.systemd.usable:
            yield Refusal(
                f"the user's systemd does not answer, though {facts.user} may linger",
                f"sudo systemctl start user@{facts.uid}.service; or {otherwise}",
            )


def _model_files(desired: TargetState, facts: HostFacts) -> Iterator[Path]:
    if desired.source.name not in facts.carried:
        yield from (path for path in desired.source.files.values() if isinstance(path, Path))
