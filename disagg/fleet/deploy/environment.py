"""The Python environment that a host should have, or a Refusal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from disagg.config import Deploy, Host
from disagg.fleet.conditions.table import PREFERRED, pythons
from disagg.fleet.deploy import requirements
from disagg.fleet.deploy.requirements import (
    PYTHONS,
    PackageRequirements,
    Pin,
    Wheel,
    choose_wheels,
    hash_lines,
    host_tags,
    pin_lines,
)
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.findings import Finding
from disagg.fleet.facts.host import HostFacts, Python

_UV_VERSION: Final = "3.12"  # what uv downloads if the host has no new enough Python
OTHER_BUILDS: Final = re.compile(r"torch.*|triton|vllm|tilelang|(flashinfer|nccl|nvidia|cuda).+")
"""Packages of which sources other than PyPI have builds of their own, such as torch 2.13.0+cpu, or that only some such
builds need."""
LARGE_BYTES: Final = 1_000_000_000
"""More bytes of packages are refused for a host that computes on its CPU: MLX has 0.1 GB, torch with CUDA 2.9 GB."""


@dataclass(frozen=True)
class Environment:
    """A Python environment. locked: the packages of the lock, or of constraints.txt. python: None if uv is to download
    one. uv: path of uv, "" if pip installs. extras: of disagg."""

    requirements: tuple[str, ...]
    locked: Mapping[str, Pin]
    python: Python | None
    uv: str
    site_packages: bool
    platform: tuple[str, str]
    options: tuple[str, ...]
    wheels: tuple[Wheel, ...] = ()
    extras: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The Python version, such as "3.12"."""
        return "{}.{}".format(*self.python.version[:2]) if self.python is not None else _UV_VERSION

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits that name the environment. The installer is not part of it, and neither are the hashes
        of files: an index may get wheels for further systems."""
        own = self.python.path if self.python is not None and self.python.configured else ""
        content = [
            self.requirements,
            self._pins,
            (self.version, own, self.site_packages, self.platform),
            self.options,
            [(wheel.path.name, wheel.path.stat().st_size) for wheel in self.wheels],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @cached_property
    def packages(self) -> dict[str, Pin]:
        """What is installed, by name. Empty without a lock of its own: constraints.txt also has what others need."""
        needed = {name: one for name, one in self.locked.items() if not one.pythons or self.version in one.pythons}
        return needed if any(one.nbytes for one in needed.values()) else {}

    @property
    def other_sources(self) -> bool:
        """Whether hosts.toml names sources that may have other builds than the lock's. An index_url is a mirror."""
        return bool(self.wheels) or not {"--extra-index-url", "--find-links"}.isdisjoint(self.options)

    @cached_property
    def hashed(self) -> dict[str, Pin]:
        """The packages of which only the lock's files are installed: all of them, unless hosts.toml names sources that
        may have other builds, the host keeps what its vendor has installed, or its Python is newer than the locks."""
        if self.site_packages or self.version not in PYTHONS:
            return {}
        packages = {name: one for name, one in self.packages.items() if one.hashes}
        sent = {wheel.name for wheel in self.wheels} or packages.keys()
        kept = (name for name in packages if name in sent and not (self.other_sources and OTHER_BUILDS.fullmatch(name)))
        return {name: packages[name] for name in kept}

    @property
    def all_hashed(self) -> bool:
        """Whether every package is one of `hashed`: then nothing else is installed, nor asked for."""
        return bool(self.hashed) and len(self.hashed) == len(self.packages)

    @property
    def files(self) -> dict[str, bytes | Path]:
        """The files that the installer reads, by path below its folder. With hashed.txt it installs this first."""
        if self.all_hashed:
            lines = {"requirements.txt": hash_lines(self.hashed), "constraints.txt": ""}
        else:
            lines = {"requirements.txt": "\n".join((*self.requirements, "")), "constraints.txt": self._pins}
            if self.hashed:
                lines["hashed.txt"] = hash_lines(self.hashed)
        texts: dict[str, bytes | Path] = {name: text.encode() for name, text in lines.items()}
        return texts | {f"wheels/{wheel.path.name}": wheel.path for wheel in self.wheels}

    @property
    def _pins(self) -> str:
        return pin_lines(self.locked)


def environment(host: Host, deploy: Deploy, facts: HostFacts, needed: PackageRequirements) -> Environment | Refusal:
    """The environment for a host. If several Pythons are possible, one whose environment already exists."""
    found = pythons(host, deploy, facts)
    if isinstance(found, Finding):
        return Refusal.of(found)
    made = [_environment(host, deploy, facts, python, needed) for python in found]
    there = (one for one in made if isinstance(one, Environment) and facts.environments.get(one.hash))
    return next(there, None) or (made[0] if deploy.cuda_on_cpu else _without_cuda(made[0], host))


def _without_cuda(wanted: Environment | Refusal, host: Host) -> Environment | Refusal:
    """A Refusal if CUDA's packages were downloaded for a host that computes on its CPU. Not if hosts.toml names a
    source that may have smaller ones."""
    if isinstance(wanted, Refusal) or host.engine.device != "cpu" or wanted.site_packages or wanted.other_sources:
        return wanted
    if (total := sum(one.nbytes for one in wanted.packages.values())) < LARGE_BYTES:
        return wanted
    return Refusal(
        f'{total / 1e9:.2g} GB to download, most of it for CUDA, and engine.device is "cpu"',
        "in [deploy] of hosts.toml: extra_index_urls with an index of torch for CPUs, or cuda_on_cpu = true",
    )


def _environment(
    host: Host, deploy: Deploy, facts: HostFacts, python: Python | None, needed: PackageRequirements
) -> Environment | Refusal:
    target = requirements.marker_environment(facts, python)
    extras = requirements.extras(host)
    lines = requirements.requirements(extras, needed.declared, target)
    path, locked = needed.lock(extras, facts)
    options = list(_options(deploy))
    wheels: tuple[Wheel, ...] = ()
    if deploy.wheels is not None:
        found = _wheels(deploy.wheels, facts, python, lines=lines, locked=locked, source=(path, extras))
        if isinstance(found, Refusal):
            return found
        wheels = found
        if deploy.index_url is None and not deploy.extra_index_urls:
            options.append("--no-index")
    uv = facts.uv if deploy.installer != "pip" and not host.site_packages else ""
    return Environment(
        lines, locked, python, uv, host.site_packages, (facts.os, facts.arch), tuple(options), tuple(wheels), extras
    )


def _options(deploy: Deploy) -> Sequence[str]:
    """Options that pip and uv share."""
    pairs = [("--index-url", url) for url in (deploy.index_url,) if url is not None]
    pairs += [("--extra-index-url", url) for url in deploy.extra_index_urls]
    pairs += [("--find-links", link) for link in deploy.find_links]
    # pip ignores an http:// index unless its host is trusted.
    trusted = [parts.netloc for _, link in pairs if (parts := urlsplit(link)).scheme == "http"]
    pairs += [("--trusted-host", place) for place in dict.fromkeys(trusted)]
    return [word for pair in pairs for word in pair]


def _wheels(
    folder: Path,
    facts: HostFacts,
    python: Python | None,
    *,
    lines: Sequence[str],
    locked: Mapping[str, Pin],
    source: tuple[str, tuple[str, ...]],
) -> tuple[Wheel, ...] | Refusal:
    """The wheels that the host needs. source: the lock's path below disagg/fleet, and the extras, for the hint."""
    assumed = python or Python("", (*PREFERRED[0], 0))
    target = requirements.marker_environment(facts, assumed)
    found, missing = choose_wheels(folder, lines, locked, target, host_tags(facts, assumed))
    if not missing:
        return tuple(found)
    what = f"cp{assumed.version[0]}{assumed.version[1]} on {facts.sys_platform} {facts.arch}"
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    path, extras = source
    wanted = f"-c disagg/fleet/{path} '.[{','.join(extras)}]'"
    if path != requirements.CONSTRAINTS.name:
        wanted = f"--no-deps --require-hashes -r disagg/fleet/{path}"
    hint = f"on a machine of that kind, in a checkout of this disagg: pip download -d wheels {wanted}; copy them to"
    return Refusal(f"{folder} has no wheel of {shown} for {what}", f"{hint} {folder}")
