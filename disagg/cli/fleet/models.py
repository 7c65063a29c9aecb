"""`disagg models pull | list | rm`: the models on the hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.common.change import Change, finish
from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import settings, stderr
from disagg.cli.common.hosts import HostCommand
from disagg.cli.common.options import AsJson, Yes, command_group
from disagg.cli.views.errors import error_view
from disagg.cli.views.items import plain_table
from disagg.cli.views.progress import DeployProgress
from disagg.config import Fleet, Host
from disagg.errors import DisaggError, UsageError, exit_code_of_all
from disagg.fleet.deploy.steps import StepProgress
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.fleet.models.inventory import ModelInventory, chosen, neighbours, removable, remove
from disagg.fleet.models.pull import Models, PullResult
from disagg.units import counted, seconds, size

models = command_group("models", "Copy models to the hosts, list them, remove them.")
Named = Annotated[
    list[str] | None, typer.Argument(metavar="MODEL", help="Models of hosts.toml.", autocompletion=complete_model)
]
_STATES = {"complete": "green", "partial": "yellow", "absent": "dim"}
_RESULTS = {"there": "dim", "downloaded": "green", "copied": "green", "failed": "bold red"}


@models.command(cls=HostCommand)
def pull(context: typer.Context, model: Named = None, *, as_json: AsJson = False) -> None:
    """Copy the models to the hosts that serve them: one download from the hub, then copies from host to host.

    A complete model is not copied again. An interrupted copy continues where it stopped.
    """
    fleet = settings(context).fleet()
    wanted = _chosen(context, fleet, model)
    progress = DeployProgress(stderr())
    with Models(fleet) as these:
        inventories, errors = _survey(these, fleet.engine_hosts)
        with progress:
            done = these.pull(
                inventories, wanted, lambda where, what, how: progress.report(StepProgress(where.name, 1, 1, what, how))
            )
    lost = {name: error for name, error in errors.items() if any(one.name == name for one in wanted)}
    body = {"fleet": fleet.name, "hosts": [one.to_json() for one in done], "errors": _json_errors(lost)}
    failed = [*lost.values(), *(one.error for one in done if one.error is not None)]
    finish(as_json, body, pulled_view(done, lost), code=_exit_code(failed))


@models.command("list", cls=HostCommand)
def list_models(context: typer.Context, model: Named = None, *, as_json: AsJson = False) -> None:
    """Show each host's model: its size, its revision, whether it is complete."""
    fleet = settings(context).fleet()
    with Models(fleet) as these:
        inventories, errors = _survey(these, _chosen(context, fleet, model))
    rows = [{"host": one.host.name, "model": one.host.model, **one.model.to_json()} for one in inventories]
    body = {"fleet": fleet.name, "hosts": rows, "errors": _json_errors(errors)}
    finish(as_json, body, inventories_view(inventories, errors), code=_exit_code(errors.values()))


@models.command(cls=HostCommand)
def rm(
    context: typer.Context,
    model: Named = None,
    *,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove models that were pulled or deployed to the hosts. Folders that hosts.toml names by their path stay."""
    if not model and not settings(context).selection:
        raise UsageError("which model? this would remove all of them", "name a MODEL, or a --host")
    change = Change("models rm", "removes", yes=yes, as_json=as_json)
    fleet = settings(context).fleet()
    wanted = _chosen(context, fleet, model)
    with Models(fleet) as these:
        inventories, failures = _survey(these, neighbours(fleet, wanted))
        errors = {one.name: failures[one.name] for one in wanted if one.name in failures}
        there = (one for one in inventories if one.host in wanted)
        by_name = {one.host.name: one for one in there if removable(one) or one.model.state != "absent"}
        if by_name:
            change.ask(f"Remove from {counted(len(by_name), 'host')}?", inventories_view([*by_name.values()], {}))
        going = [one.host for one in by_name.values()]
        outcomes = each(going, lambda where: remove(these.machines[where], by_name[where.name]))
    carried = [one.host.name for one in by_name.values() if one.required.carried]
    failed = errors | {one.host.name: one.error for one in outcomes if one.error is not None}
    removed = [one.host.name for one in outcomes if one.ok]
    body = {"fleet": fleet.name, "removed": removed, "errors": _json_errors(failed)}
    change.finish(body, removed_view(outcomes, errors, carried), code=_exit_code(failed.values()))


def _chosen(context: typer.Context, fleet: Fleet, names: Sequence[str] | None) -> list[Host]:
    selection = settings(context).selection
    among = fleet.select(**selection, managed=True)
    selected = chosen(fleet, names or (), among)
    if not selected and not chosen(fleet, (), among):
        of = "none of these hosts" if selection else "no host"
        raise UsageError(f"{of} of {fleet.path} needs a model's files: all are simulated, or gateways")
    if not selected:
        raise UsageError(f"no host of {fleet.path} has that name and that model", "leave out MODEL or --host")
    return selected


def _survey(these: Models, hosts: Sequence[Host]) -> tuple[list[ModelInventory], dict[str, DisaggError]]:
    """The inventories of the hosts, and the errors of those that could not be read."""
    with stderr().status("reading the hosts' models …"):
        read = these.survey(hosts)
    errors = {host.name: one for host, one in zip(hosts, read, strict=True) if isinstance(one, DisaggError)}
    return [one for one in read if not isinstance(one, DisaggError)], errors


def _json_errors(errors: dict[str, DisaggError]) -> dict[str, object]:
    return {name: error.to_json() for name, error in errors.items()}


def _exit_code(errors: Iterable[DisaggError]) -> int:
    """4 if a host cannot be reached, 1 if anything else failed."""
    return exit_code_of_all(error.exit_code for error in errors)


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


def _table(*names: str) -> Table:
    right = ("size", "took")
    return plain_table(*names, bold=["host"], fold=names, right=right, whole=(*right, "host", "revision"))


def _errors(errors: Mapping[str, DisaggError]) -> Iterator[RenderableType]:
    for error in errors.values():
        yield Text()
        yield error_view(error)
