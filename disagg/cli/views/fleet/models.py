"""Models on hosts: what is there, what was brought, what was removed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.views.errors import error_view
from disagg.errors import DisaggError
from disagg.fleet.machine.fan_out import HostOutcome
from disagg.fleet.models.inventory import ModelInventory
from disagg.fleet.models.pull import PullResult
from disagg.units import seconds, size

_STATES = {"complete": "green", "partial": "yellow", "absent": "dim"}
_RESULTS = {"there": "dim", "downloaded": "green", "copied": "green", "failed": "bold red"}


def inventories_view(inventories: Sequence[ModelInventory], errors: Mapping[str, DisaggError]) -> RenderableType:
    """One row per host, two lines each: its model above, the source of it below."""
    table = _table("host", "model\nsource", "state", "size", "revision")
    for inventory in inventories:
        held = inventory.model
        state = Text(held.state, _STATES[held.state])
        if held.state == "partial" and held.missing:
            state.append(f"\n{held.missing}", "dim")
        name = Text.assemble(inventory.host.model, "\n", (_shown(inventory), "dim"))
        table.add_row(
            inventory.host.name, name, state, size(held.bytes) if held.bytes else "–", held.revision[:8] or "–"
        )
    return Group(*([table] if inventories else []), *_errors(errors))


def _shown(inventory: ModelInventory) -> str:
    """The name of a carried model's folder is a hash, so its hosts.toml name is shown."""
    return "carried by disagg deploy" if inventory.required.carried else inventory.required.source


def pulled_view(done: Sequence[PullResult], errors: Mapping[str, DisaggError]) -> RenderableType:
    """One row per host, then each failure with its hint."""
    table = _table("host", "model", "result", "size", "took")
    for one in done:
        result = Text(one.result, _RESULTS[one.result])
        if one.source_host:
            result.append(f" from {one.source_host}", "not bold dim")
        took = seconds(one.seconds) if one.result != "there" else "–"
        table.add_row(one.host.name, one.host.model, result, size(one.bytes) if one.bytes else "–", took)
    failures = {one.host.name: one.error for one in done if one.error is not None}
    return Group(*([table] if done else []), *_errors({**errors, **failures}))


def removed_view(
    outcomes: Sequence[HostOutcome[int]], errors: Mapping[str, DisaggError], carried: Collection[str] = ()
) -> RenderableType:
    """One line per host: the bytes freed; then the command that restores it.

    `carried`: hosts whose models are deployed, not pulled.
    """
    lines = [
        Text.assemble((f"{one.host.name}: ", "bold"), f"{size(one.value)} freed")
        for one in outcomes
        if one.value is not None
    ]
    if not outcomes and not errors:
        lines = [Text("nothing to remove")]
    gone = {one.host.name for one in outcomes if one.value is not None}
    back = [
        *(["disagg deploy"] if gone & set(carried) else []),
        *(["disagg models pull"] if gone - set(carried) else []),
    ]
    if gone:
        words = "A running server keeps its loaded model, but cannot start again without the files: "
        lines.append(Text.assemble((words, "dim"), (", ".join(back), "bold cyan"), (" copies them again", "dim")))
    failures = {one.host.name: one.error for one in outcomes if one.error is not None}
    return Group(*lines, *_errors({**errors, **failures}))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        right = name in ("size", "took")
        table.add_column(
            name, overflow="fold", style="bold" if number == 0 else "", justify="right" if right else "left",
            no_wrap=right or name in ("host", "revision"),
        )  # fmt: skip
    return table


def _errors(errors: Mapping[str, DisaggError]) -> Iterator[RenderableType]:
    for error in errors.values():
        yield Text()
        yield error_view(error)
