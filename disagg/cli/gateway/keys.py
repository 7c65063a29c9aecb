"""`disagg keys add | edit | list | revoke | sync`: the keys of the gateway's clients.

They are in a file on this machine and on every gateway that is deployed elsewhere. Several people may change them from
machines of their own, so each change begins with the keys of all gateways.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from rich.console import RenderableType

from disagg.api.requests import MAX_ANSWERS, MAX_WEIGHT
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.hosts import FanOutCommand
from disagg.cli.common.options import AsJson, choice_option, command_group, model_option, one_of, with_options
from disagg.cli.views.items import plain_table
from disagg.config import Fleet, Host
from disagg.errors import ConfigError, DisaggError, FleetError, HostUnreachable, RequestError, UsageError
from disagg.fleet.deploy.client_keys import deliver_keys, fetch_keys, gateways
from disagg.gateway.clients.keys import Grants, Key, KeyFile, joined, parsed, written
from disagg.gateway.dialects.managing import keep_alive_s
from disagg.units import counted

keys = command_group("keys", "Add, edit, list and revoke the keys of the clients of `disagg serve`.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who uses the key.", show_default=False)]
_LIMITS = ("model", "requests", "tokens", "parallel", "keep-alive")
"""What `disagg keys edit` can remove."""
_FIELDS = {
    "model": "models",
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "keep-alive": "keep_alive_s",
    "keep_alive": "keep_alive_s",
}
"""Options -> fields of a key, where they differ."""


def _grants(
    *,
    model: Annotated[list[str] | None, model_option("Only this model; repeatable.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most this many requests per minute.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="At most this many tokens per minute.")] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, max=MAX_ANSWERS, metavar="N", help="At most this many answers at a time.")
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_WEIGHT, metavar="N", help="2: twice the share of a key of weight 1 when hosts are busy."
        ),
    ] = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(metavar="LENGTH", help="Its requests keep a model loaded at most so long: 90, 5m, 1h30m."),
    ] = None,
    monitor: Annotated[
        bool | None, typer.Option("--monitor/--no-monitor", help="See the requests of all keys, not only its own.")
    ] = None,
    admin: Annotated[
        bool | None, typer.Option("--admin/--no-admin", help="Pull, delete and pin models, and load any.")
    ] = None,
    load: Annotated[
        bool | None, typer.Option("--load/--no-load", help="Load models that are asleep, as a key may by default.")
    ] = None,
) -> dict[str, Any]:
    """The fields of a key that are stated."""
    return {_FIELDS.get(name, name): value for name, value in locals().items() if value not in (None, [])}


@keys.command(cls=FanOutCommand)
@with_options(_grants)
def add(
    context: typer.Context,
    name: Name,
    *,
    options: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: only its hash is kept.

    A running gateway accepts it at once; the gateways of hosts.toml get it, too. As soon as there is a key, every
    client needs one.
    """
    fleet = settings(context).fleet()
    grants = _known(fleet, options)
    others, file, _ = _joined(fleet)
    secret = file.add(name, **grants)
    if as_json:
        print_json({"name": name, "key": secret})
    else:
        typer.echo(secret)
        stderr().print(f"The key of {name}. It is not shown again.")
    others.deliver(file)


@keys.command(cls=FanOutCommand)
@with_options(_grants)
def edit(
    context: typer.Context,
    name: Name,
    *,
    options: dict[str, Any],
    remove: Annotated[
        list[str] | None,
        choice_option(_LIMITS, metavar="LIMIT", help=f"Remove {one_of(_LIMITS)}; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the limits of a key. What is not named stays, and so does the key itself.

    A running gateway applies the change from the next request on.
    """
    fleet = settings(context).fleet()
    grants = _known(fleet, options)
    for limit in remove or ():
        if _FIELDS.get(limit, limit) in grants:
            raise UsageError(f"--remove {limit}: --{limit} sets it", "give one of the two")
    changes = cast("Grants", {**grants, **dict.fromkeys(_FIELDS.get(limit, limit) for limit in remove or ())})
    if not changes:
        raise UsageError(f"nothing is to be changed about the key of {name}", "see `disagg keys edit --help`")
    others, file, before = _joined(fleet)
    key = file.edit(name, **changes)
    if not as_json:
        stderr().print(f"The key of {name} has these already." if key in before else f"Changed the key of {name}.")
    others.deliver(file)
    if as_json:
        print_json({"key": _shown(key), "gateways": [host.name for host in others.hosts]})


def _known(fleet: Fleet, stated: dict[str, Any]) -> Grants:
    """What the options state, with the canonical names of models, and lengths of time in seconds."""
    known = dict(stated)
    if "models" in stated:
        known["models"] = [fleet.model(one).name for one in stated["models"]]
    if "keep_alive_s" in stated:
        known["keep_alive_s"] = _bound_s(stated["keep_alive_s"])
    return cast("Grants", known)


def _bound_s(text: str) -> float:
    """Raises UsageError."""
    try:
        seconds = keep_alive_s(text, "--keep-alive")
    except RequestError as error:
        raise UsageError(error.message, "give seconds, or a length such as 5m or 1h30m") from error
    if seconds is None or math.isinf(seconds):
        raise UsageError("--keep-alive: a key without this limit keeps models as long as it likes", "leave it out")
    return seconds


def _shown(key: Key) -> dict[str, Any]:
    return {field: value for field, value in key.to_json().items() if field != "sha256"}


@keys.command("list", cls=FanOutCommand)
def list_keys(context: typer.Context, *, as_json: AsJson = False) -> None:
    """Show the keys: whose they are, their models and limits, and which are revoked."""
    fleet = settings(context).fleet()
    others = _GatewayKeys.fetched(fleet)
    found = joined([KeyFile.of(fleet).read(), *others.by_host.values()])
    if as_json:
        print_json({"keys": [_shown(key) for key in found]})
    elif found:
        stdout().print(keys_view(found))
    else:
        stderr().print("There are no keys.")
    for name, error in {**others.failed, **others.damaged}.items():
        stderr().print(f"Without the keys of {name}: {error}")
    if lacking := others.lacking(found):
        stderr().print(f"{', '.join(lacking)}: not all of these keys; `disagg keys sync` brings them")


@keys.command(cls=FanOutCommand)
def revoke(context: typer.Context, name: Name, *, as_json: AsJson = False) -> None:
    """End a key. A running gateway refuses it from the next request on."""
    others, file, _ = _joined(settings(context).fleet())
    file.revoke(name)
    if not as_json:
        stderr().print(f"Revoked the key of {name}.")
    others.deliver(file)
    if as_json:
        print_json({"name": name, "gateways": [host.name for host in others.hosts]})


@keys.command(cls=FanOutCommand)
def sync(context: typer.Context, *, as_json: AsJson = False) -> None:
    """Bring the keys of this machine and of all gateways together.

    `disagg keys add`, `edit` and `revoke` do so too: this is for a gateway that could not be reached then.
    """
    others, file, joined_keys = _joined(settings(context).fleet())
    count = len(joined_keys)
    others.deliver(file)
    if as_json:
        print_json({"keys": count, "gateways": [host.name for host in others.hosts]})
        return
    stderr().print(f"{counted(count, 'key')} on this machine and {counted(len(others.hosts), 'gateway')}.")


@dataclass(frozen=True, slots=True)
class _GatewayKeys:
    """The keys of the deployed gateways, by host; why others could not be asked, and whose files cannot be read."""

    hosts: Sequence[Host]
    by_host: Mapping[str, Sequence[Key]]
    failed: Mapping[str, DisaggError]
    damaged: Mapping[str, DisaggError]

    @classmethod
    def fetched(cls, fleet: Fleet) -> _GatewayKeys:
        outcomes = fetch_keys(hosts) if (hosts := gateways(fleet)) else []
        failed = {one.host.name: one.error for one in outcomes if one.error is not None}
        deployed = [(one.host, one.value) for one in outcomes if one.value is not None]
        by_host: dict[str, Sequence[Key]] = {}
        damaged: dict[str, DisaggError] = {}
        for host, data in deployed:
            try:
                by_host[host.name] = parsed(data, f"the file of keys on {host.name}")
            except ConfigError as error:
                damaged[host.name] = error
        return cls([host for host, _ in deployed], by_host, failed, damaged)

    def lacking(self, keys: Sequence[Key]) -> list[str]:
        """The gateways that have other keys than these."""
        return [*self.damaged, *(name for name, theirs in self.by_host.items() if set(theirs) != set(keys))]

    def deliver(self, file: KeyFile) -> None:
        """Bring the keys to the gateways, which keep what was added there meanwhile; a damaged file is replaced. Raises
        the first failure, after all have been tried."""
        bring = self.hosts and file.path.exists()
        outcomes = deliver_keys(self.hosts, _merging(file.read())) if bring else []
        failed = {
            **self.failed,
            **({} if bring else self.damaged),
            **{one.host.name: one.error for one in outcomes if one.error is not None},
        }
        if failed:
            first = next(iter(failed.values()))
            unreachable = all(isinstance(error, HostUnreachable) for error in failed.values())
            kind = HostUnreachable if unreachable else FleetError
            raise kind(f"{', '.join(failed)} still has the earlier keys: {first}", "run `disagg keys sync` later")


def _merging(ours: Sequence[Key]) -> Callable[[str, bytes], bytes]:
    """Adds these keys to the content of a gateway's file."""

    def merged(name: str, there: bytes) -> bytes:
        try:
            return written(joined([parsed(there, f"the file of keys on {name}"), ours]))
        except ConfigError:
            return written(ours)

    return merged


def _joined(fleet: Fleet) -> tuple[_GatewayKeys, KeyFile, Sequence[Key]]:
    """The gateways' keys, and this machine's file, which has theirs too: how a change begins."""
    others, file = _GatewayKeys.fetched(fleet), KeyFile.of(fleet)
    return others, file, file.join([*others.by_host.values()])


def keys_view(keys: Sequence[Key]) -> RenderableType:
    """One row per key, revoked ones dimmed. On a narrow terminal names take several lines, and nothing is cut."""
    whole = ("id", "models", "limits", "added", "revoked")
    table = plain_table("name", *whole, fold=("name", *whole), whole=whole)
    for key in keys:
        table.add_row(
            key.name,
            key.id,
            "\n".join(key.models) if key.models else "all",
            "\n".join(_limits(key)) or "–",
            _date(key.created),
            _date(key.revoked) if key.revoked else "",
            style="dim" if key.revoked else None,
        )
    return table


def _limits(key: Key) -> Iterator[str]:
    """What the key may have, a line each."""
    if key.requests_per_minute is not None:
        yield f"{key.requests_per_minute:,} requests/min"
    if key.tokens_per_minute is not None:
        yield f"{key.tokens_per_minute:,} tokens/min"
    if key.parallel is not None:
        yield f"{counted(key.parallel, 'answer')} at once"
    if key.weight != 1:
        yield f"weight {key.weight}"
    if key.keep_alive_s is not None:
        yield f"keeps models for {key.keep_alive_s:g} s"
    if key.monitor:
        yield "monitor"
    if key.admin:
        yield "admin"
    if not key.load:
        yield "loads no models"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
