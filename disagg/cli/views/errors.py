"""How errors look: what failed, then how to fix it; the same problem of several hosts once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from disagg.errors import DisaggError

_HOSTS = "\0"


def error_view(error: DisaggError) -> RenderableType:
    """Two lines: `error: <message>` and, if it has one, `hint: <hint>`."""
    lines = [Text.assemble(("error: ", "bold red"), error.message)]
    if error.hint:
        lines.append(Text.assemble((" hint: ", "bold cyan"), error.hint))
    return Group(*lines)


def error_views(errors: Iterable[tuple[str, DisaggError]], all_hosts: Collection[str]) -> Iterator[RenderableType]:
    """An empty line and the error, for each error of a host; those of several hosts that are the same, once."""
    listed = list(errors)
    originals = dict(listed)
    for shared in together(((host, error.message, error.hint) for host, error in listed), all_hosts):
        yield Text()
        if len(shared.hosts) == 1:
            yield error_view(originals[shared.hosts[0]])
        else:
            yield error_view(DisaggError(f"{host_names(shared.hosts, all_hosts)}: {shared.cause}", shared.hint))


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
