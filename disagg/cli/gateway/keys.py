"""`disagg keys add | list | revoke`: the keys of the gateway's clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, Command, CommandGroup

if TYPE_CHECKING:
    from disagg.config import Fleet
    from disagg.gateway.clients.keys import KeyFile

keys = typer.Typer(
    name="keys",
    cls=CommandGroup,
    help="Add, list and revoke the keys of the clients of `disagg serve`.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who uses the key.", show_default=False)]
PerMinute = Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many per minute.")]


@keys.command(cls=Command)
def add(
    context: typer.Context,
    name: Name,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m", "--model", metavar="NAME", help="Only this model; repeatable.", autocompletion=complete_model
        ),
    ] = None,
    requests: PerMinute = None,
    tokens: PerMinute = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: only its hash is kept.

    A running gateway accepts it at once; the gateways of hosts.toml get it, too. As soon as there is a key, every
    client needs one.
    """
    fleet = settings(context).fleet()
    models = [fleet.model(one).name for one in model or ()]
    secret = _file(context).add(name, models=models, requests_per_minute=requests, tokens_per_minute=tokens)
    if as_json:
        print_json({"name": name, "key": secret})
    else:
        typer.echo(secret)
        stderr().print(f"The key of {name}. It is not shown again.")
    _deliver(fleet)


@keys.command("list", cls=Command)
def list_keys(context: typer.Context, *, as_json: AsJson = False) -> None:
    """Show the keys: whose they are, their models and limits, and which are revoked."""
    from disagg.cli.views.gateway.keys import keys_view

    found = _file(context).read()
    if as_json:
        print_json(
            {"keys": [{field: value for field, value in key.to_json().items() if field != "sha256"} for key in found]}
        )
    elif found:
        stdout().print(keys_view(found))
    else:
        stderr().print("There are no keys.")


@keys.command(cls=Command)
def revoke(context: typer.Context, name: Name) -> None:
    """End a key. A running gateway refuses it from the next request on."""
    _file(context).revoke(name)
    stderr().print(f"Revoked the key of {name}.")
    _deliver(settings(context).fleet())


def _deliver(fleet: Fleet) -> None:
    """Bring the keys to the gateways of the fleet. Raises the first failure, after all have been tried."""
    if not any(host.gateway and host.placement.deployed for host in fleet.hosts.values()):
        return
    from disagg.errors import FleetError, HostUnreachable
    from disagg.fleet.deploy.client_keys import deliver_keys

    failed = [outcome for outcome in deliver_keys(fleet) if outcome.error is not None]
    if failed:
        names = ", ".join(outcome.host.name for outcome in failed)
        kind = HostUnreachable if all(isinstance(one.error, HostUnreachable) for one in failed) else FleetError
        raise kind(
            f"{names} still has the earlier keys: {failed[0].error}", f"disagg deploy --host {failed[0].host.name}"
        )


def _file(context: typer.Context) -> KeyFile:
    from disagg.gateway.clients.keys import KeyFile

    return KeyFile.of(settings(context).fleet())
