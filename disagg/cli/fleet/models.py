"""`disagg models list | pull | load | unload | pin | rm`: the models on the hosts, and in their memory.

Files are looked at and copied over SSH. What is loaded is asked of the hosts themselves, as are all changes of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.common.change import Change, finish
from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import settings, stderr
from disagg.cli.common.hosts import HostCommand
from disagg.cli.common.options import AsJson, Yes, command_group
from disagg.cli.views.errors import error_view, host_options
from disagg.cli.views.items import plain_table
from disagg.cli.views.progress import DeployProgress
from disagg.config import Fleet, Host, Model
from disagg.errors import ConfigError, DisaggError, ServerUnavailable, UsageError, exit_code_of_all
from disagg.fleet.deploy.steps import StepProgress
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.fleet.models.inventory import ModelInventory, chosen, neighbours, removable, remove
from disagg.fleet.models.pull import Models, PullResult
from disagg.units import counted, estimate, seconds, size

if TYPE_CHECKING:
    from disagg.api.gateway import LiveHost
    from disagg.api.keeper import LoadEvent
    from disagg.inference.client import AsyncClient
    from disagg.inference.keepers import Keepers

T = TypeVar("T")
models = command_group("models", "Copy models to the hosts, list them, load and unload them, remove them.")
Named = Annotated[
    list[str] | None, typer.Argument(metavar="MODEL", help="Models of hosts.toml.", autocompletion=complete_model)
]
_STATES = {"complete": "green", "partial": "yellow", "absent": "dim"}
_RESULTS = {"there": "dim", "downloaded": "green", "copied": "green", "failed": "bold red"}


@models.command(cls=HostCommand)
def pull(
    context: typer.Context,
    model: Named = None,
    *,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also models that their host cannot serve.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the models to the hosts that serve them: one download from the hub, then copies from host to host.

    A complete model is not copied again. An interrupted copy continues where it stopped. Before anything else of a
    model its config.json is read, and hosts whose engine cannot serve it get no more of it.
    """
    fleet = settings(context).fleet()
    wanted = _chosen(context, fleet, model)
    progress = DeployProgress(stderr())
    with Models(fleet) as these:
        inventories, errors = _survey(these, fleet.engine_hosts)
        with progress:
            done = these.pull(
                inventories,
                wanted,
                lambda where, what, how: progress.report(StepProgress(where.name, 1, 1, what, how)),
                anyway=anyway,
            )
    lost = {name: error for name, error in errors.items() if any(one.name == name for one in wanted)}
    body = {"fleet": fleet.name, "hosts": [one.to_json() for one in done], "errors": _json_errors(lost)}
    failed = [*lost.values(), *(one.error for one in done if one.error is not None)]
    finish(as_json, body, pulled_view(done, lost), code=_exit_code(failed))


@models.command("list", cls=HostCommand)
def list_models(context: typer.Context, model: Named = None, *, as_json: AsJson = False) -> None:
    """Show each host's models: size on disk, revision, whether the files are complete; whether they are loaded, and
    when they were used last."""
    fleet = settings(context).fleet()
    with Models(fleet) as these:
        inventories, errors = _survey(these, _chosen(context, fleet, model))
    live = _live(fleet)
    rows = [_row(one, live.get(one.host.name)) for one in inventories]
    body = {"fleet": fleet.name, "hosts": rows, "errors": _json_errors(errors)}
    finish(as_json, body, inventories_view(inventories, errors, live), code=_exit_code(errors.values()))


def _row(inventory: ModelInventory, live: LiveHost | None) -> dict[str, object]:
    kept = live.kept if live is not None else None
    return {
        "host": inventory.host.table,
        "model": inventory.host.model,
        **inventory.model.to_json(),
        "verdict": inventory.verdict,
        "server": live.state if live is not None else None,
        "kept": kept.to_json() if kept is not None else None,
    }


def _live(fleet: Fleet) -> Mapping[str, LiveHost]:
    """What the hosts say of their models now, by the names of Fleet.served; nothing if the fleet has no token yet."""
    from disagg.gateway.watch.hosts import live_hosts

    async def look(client: AsyncClient) -> Mapping[str, LiveHost]:
        return {host.name: host for host in live_hosts(fleet, client.view, time.monotonic())}

    try:
        return _asked(fleet, look)
    except ConfigError:
        return {}


def _asked(fleet: Fleet, ask: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Run this with a client that has looked at the hosts."""
    import uvloop

    from disagg.inference.client import AsyncClient

    async def run() -> T:
        async with AsyncClient(fleet) as client:
            await client.connect()
            return await ask(client)

    return uvloop.run(run())


One = Annotated[str, typer.Argument(metavar="MODEL", help="A model of hosts.toml.", autocompletion=complete_model)]


@models.command(cls=HostCommand)
def load(context: typer.Context, model: One, *, as_json: AsJson = False) -> None:
    """Load a model on one host of each role that a request needs; with --host and the like on all these.

    Waits until it is loaded, or its turn comes; Ctrl-C gives the place up. It stays as long as hosts.toml says.
    """
    progress = DeployProgress(stderr())

    async def ask(keepers: Keepers, found: Model) -> None:
        with progress:
            await keepers.load(
                found,
                on_load=lambda host, event: progress.report(
                    StepProgress(host.table, 1, 1, f"load {host.model}", how_far(event))
                ),
            )

    _change(context, model, ask, "{model} is loaded", as_json=as_json)


@models.command(cls=HostCommand)
def unload(
    context: typer.Context,
    model: One,
    *,
    force: Annotated[bool, typer.Option("--force", help="Also if requests use it, which then fail.")] = False,
    as_json: AsJson = False,
) -> None:
    """Unload a model from the hosts with several. The next request loads it again."""

    async def ask(keepers: Keepers, found: Model) -> None:
        await keepers.unload(found, force=force)

    _change(context, model, ask, "{model} is unloaded", as_json=as_json)


@models.command(cls=HostCommand)
def pin(
    context: typer.Context,
    model: One,
    *,
    off: Annotated[bool, typer.Option("--off", help="Let it go again when others need its memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a model loaded whatever others need, until its host restarts; `pin` in hosts.toml is for good."""

    async def ask(keepers: Keepers, found: Model) -> None:
        await keepers.pin(found, pinned=not off)

    _change(context, model, ask, "{model} is no longer pinned" if off else "{model} is pinned", as_json=as_json)


def _change(
    context: typer.Context, name: str, ask: Callable[[Keepers, Model], Awaitable[None]], done: str, *, as_json: bool
) -> NoReturn:
    """Ask the keepers of the chosen hosts, and state what they then have of the model."""
    from disagg.gateway.watch.hosts import live_hosts
    from disagg.inference.keepers import Keepers

    fleet = settings(context).fleet()
    selection = settings(context).selection
    found = fleet.model(name)
    tables = {host.name for host in fleet.select(**selection)} if selection else None

    async def run(client: AsyncClient) -> list[LiveHost]:
        keepers = Keepers(client, tables)
        await ask(keepers, found)
        await client.connect()
        names = {host.name for host in keepers.of(found)}
        return [host for host in live_hosts(fleet, client.view, time.monotonic()) if host.name in names]

    hosts = _asked(fleet, run)
    kept = {host.name: host.kept.to_json() for host in hosts if host.kept is not None}
    where = ", ".join(f"{host.name.partition('/')[0]} ({_word(host)})" for host in hosts)
    said = Text(f"{done.format(model=found.name)}: {where}")
    finish(as_json, {"fleet": fleet.name, "model": found.name, "hosts": kept}, said)


def how_far(event: LoadEvent) -> str:
    """How far a load is, as people read it."""
    from disagg.inference.attempts.waking import UNKNOWN_S

    if event.state == "ready":
        return "loaded"
    if event.state == "loading":
        read = f"{size(event.read_bytes)} of {size(event.total_bytes)}, " if event.total_bytes else ""
        return f"{read}about {estimate(event.left_s)} left"
    if event.left_s >= UNKNOWN_S:
        return "waiting for memory"
    before = f" for {counted(event.position, 'load')} before it" if event.position else ""
    return f"waiting{before}, about {estimate(event.left_s)}"


@models.command(cls=HostCommand)
def rm(context: typer.Context, model: Named = None, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove models that were pulled or deployed to the hosts. Folders that hosts.toml names by their path stay."""
    if not model and not settings(context).selection:
        raise UsageError("which model? this would remove all of them", "name a MODEL, or a --host")
    fleet = settings(context).fleet()
    wanted = _chosen(context, fleet, model)
    only = host_options(dict.fromkeys(one.table for one in wanted), fleet.hosts) if settings(context).selection else ""
    named = "".join(f" {shlex.quote(one)}" for one in model or ())
    change = Change(f"models rm{named}{only}", "removes", yes=yes, as_json=as_json)
    with Models(fleet) as these:
        inventories, failures = _survey(these, neighbours(fleet, wanted))
        errors = {one.name: failures[one.name] for one in wanted if one.name in failures}
        there = (one for one in inventories if one.host in wanted)
        by_name = {one.host.name: one for one in there if removable(one) or one.model.state != "absent"}
        if by_name:
            change.ask(f"Remove from {counted(len(by_name), 'host')}?", inventories_view([*by_name.values()], {}))
        going = [one.host for one in by_name.values()]
        kept = _deleted(fleet, [one for one in by_name.values() if one.host.keeper])
        left = [host for host in going if host.name not in kept]
        outcomes = each(left, lambda where: remove(these.machines[where], by_name[where.name]))
        outcomes += [kept[host.name] for host in going if host.name in kept]
    carried = [one.host.name for one in by_name.values() if one.required.carried]
    failed = errors | {one.host.name: one.error for one in outcomes if one.error is not None}
    removed = [one.host.name for one in outcomes if one.ok]
    body = {"fleet": fleet.name, "removed": removed, "errors": _json_errors(failed)}
    change.finish(body, removed_view(outcomes, errors, carried), code=_exit_code(failed.values()))


def _deleted(fleet: Fleet, inventories: Sequence[ModelInventory]) -> dict[str, HostOutcome[int]]:
    """Let keepers that answer delete models, once all have unloaded them: what came of it, by the names of
    Fleet.served."""
    from disagg.inference.http import keeper_calls

    done: dict[str, HostOutcome[int]] = {}

    async def run(client: AsyncClient) -> None:
        http, left = client.connections, list(inventories)
        for change in (keeper_calls.unload, keeper_calls.delete):
            for inventory in [one for one in left if one.host.name not in done]:
                host, began = inventory.host, time.monotonic()
                try:
                    await change(http, fleet.hosts[host.keeper], host.model)
                except ServerUnavailable:
                    left.remove(inventory)
                except DisaggError as error:
                    done[host.name] = HostOutcome(host, time.monotonic() - began, error=error)
                else:
                    if change is keeper_calls.delete:
                        done[host.name] = HostOutcome(host, time.monotonic() - began, inventory.model.bytes)

    if inventories:
        _asked(fleet, run)
    return done


def _chosen(context: typer.Context, fleet: Fleet, names: Sequence[str] | None) -> list[Host]:
    selection = settings(context).selection
    tables = {host.name for host in fleet.select(**selection, managed=True)}
    only = fleet.model(selection["model"]).name if selection.get("model") else None
    among = [host for host in fleet.engine_hosts if host.table in tables and only in (None, host.model)]
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


def inventories_view(
    inventories: Sequence[ModelInventory],
    errors: Mapping[str, DisaggError],
    live: Mapping[str, LiveHost] = MappingProxyType({}),
) -> RenderableType:
    """One row per host and model, two lines each: its model above, the source of it below. live: what the hosts say
    of their models now, by the names of Fleet.served."""
    table = _table("host", "model\nsource", "state", "size", "revision")
    for inventory in inventories:
        held = inventory.model
        state = Text(held.state, _STATES[held.state])
        if inventory.verdict:
            state.append(f"\n{inventory.verdict}", "dim")
        if held.state == "partial" and held.missing:
            state.append(f"\n{held.missing}", "dim")
        if (now := live.get(inventory.host.name)) is not None:
            state.append(f"\n{_now(now)}", "dim")
        name = Text.assemble(inventory.host.model, "\n", (_shown(inventory), "dim"))
        table.add_row(
            inventory.host.table, name, state, size(held.bytes) if held.bytes else "–", held.revision[:8] or "–"
        )
    return Group(*([table] if inventories else []), *_errors(errors))


def _now(host: LiveHost) -> str:
    word, used = _word(host), host.kept.used_s if host.kept is not None else None
    return word if used is None else f"{word}, used {estimate(used)} ago"


def _word(host: LiveHost) -> str:
    """The state of a host's model: a host that is up has it."""
    return "ready" if host.state == "up" else host.state


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
    """One line per host: the bytes freed; then the command that restores it. carried: hosts whose models are deployed,
    not pulled."""
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
