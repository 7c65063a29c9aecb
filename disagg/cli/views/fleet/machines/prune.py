"""What `disagg uninstall --unused` found, and what it removed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.views.errors import error_views
from disagg.cli.views.items import Hanging
from disagg.fleet.deploy.prune.pruning import Pruned
from disagg.units import counted, size


def found_view(results: Sequence[Pruned], all_hosts: Collection[str] = ()) -> RenderableType:
    """One row for each thing, then what stays and why, then errors. `all_hosts`: all names of the fleet."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("machine", style="bold", overflow="fold")
    table.add_column("left over", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what it is", style="dim", overflow="fold")
    for one in results:
        for orphan in one.orphans:
            gone = Text("removed ", "green") if one.removed else Text("")
            table.add_row(one.host.name, gone + Text(f"{orphan.kind} {orphan.name}"), size(orphan.nbytes), orphan.about)
    notes = [Hanging(Text(f"{one.host.name}: ", "bold"), Text(note)) for one in results for note in one.notes]
    errors = error_views([(one.host.name, one.error) for one in results if one.error is not None], all_hosts)
    found = any(one.orphans for one in results)
    head: list[RenderableType] = [table, Text()] if found else []
    return Group(*head, *notes, *errors, _summary(results))


def question(found: Sequence[Pruned]) -> str:
    """`Remove 3 things (5.2 GiB) from 2 machines?`."""
    orphans = [orphan for one in found for orphan in one.orphans]
    total = size(sum(orphan.nbytes or 0 for orphan in orphans))
    machines = counted(sum(bool(one.orphans) for one in found), "machine")
    return f"Remove {counted(len(orphans), 'thing')} ({total}) from {machines}?"


def _summary(results: Sequence[Pruned]) -> Text:
    """`3 things removed (5.2 GiB), 1 thing left over (12 KiB)`."""
    parts = []
    for removed, word in ((True, "removed"), (False, "left over")):
        orphans = [orphan for one in results if one.removed == removed for orphan in one.orphans]
        total = size(sum(orphan.nbytes or 0 for orphan in orphans))
        parts += [f"{counted(len(orphans), 'thing')} {word} ({total})"] if orphans else []
    if not parts and all(one.error is None for one in results):
        return Text("nothing is left over", "dim")
    return Text(", ".join(parts))
