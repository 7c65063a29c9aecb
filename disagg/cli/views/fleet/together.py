"""The same problem on several hosts is shown once, with one command for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_HOSTS = "\0"


@dataclass(frozen=True, slots=True)
class SharedProblem:
    """Hosts with the same cause and the same hint, which may be empty."""

    hosts: tuple[str, ...]
    cause: str
    hint: str


def together(problems: Iterable[tuple[str, str, str]], all_hosts: Collection[str]) -> list[SharedProblem]:
    """Group (host, cause, hint) of each host; causes that differ in the host's name only are the same.

    `all_hosts`: the names of all hosts of the fleet; a command for all of them names none.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for host, cause, hint in problems:
        alike = cause.removeprefix(f"{host}: "), hint.replace(f" --host {host}", _HOSTS)
        groups.setdefault(alike, []).append(host)
    return [SharedProblem(tuple(hosts), cause, _for(hint, hosts, all_hosts)) for (cause, hint), hosts in groups.items()]


def host_names(hosts: Collection[str], all_hosts: Collection[str]) -> str:
    """`a, b`; `all hosts` if these are the whole fleet and more than one."""
    return "all hosts" if len(hosts) > 1 and set(hosts) == set(all_hosts) else ", ".join(hosts)


def host_options(hosts: Collection[str], all_hosts: Collection[str]) -> str:
    """` --host a --host b`; nothing if these are the whole fleet."""
    return "" if set(hosts) == set(all_hosts) else "".join(f" --host {host}" for host in hosts)


def _for(hint: str, hosts: Collection[str], all_hosts: Collection[str]) -> str:
    return hint.replace(_HOSTS, host_options(hosts, all_hosts))
