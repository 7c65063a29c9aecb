"""The Pythons of a host with which its environment can be built, or why there is none. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from disagg.config import Deploy, Host
from disagg.fleet.facts.findings import Finding, fault
from disagg.fleet.facts.host import HostFacts, Python
from disagg.version import OLDEST_PYTHON

PREFERRED: Final = ((3, 12), (3, 13), (3, 11), (3, 14))


def unmet(host: Host, deploy: Deploy, facts: HostFacts) -> Iterator[Finding]:
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
