"""How errors look: what failed, then how to fix it; the same error of several hosts once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from disagg.cli.views.fleet.together import host_names, together
from disagg.errors import DisaggError


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
