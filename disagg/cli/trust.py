"""`disagg trust`: show hosts' SSH keys, and add them to known_hosts when a person says so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.context import settings, stderr, stdout
from disagg.errors import DisaggError, UsageError

if TYPE_CHECKING:
    from disagg.config import Host


def trust(
    context: typer.Context,
    hosts: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST]...", help="Names of hosts.toml; all hosts without any.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: the fingerprints were compared.")] = False,
) -> None:
    """Show the SSH host keys of hosts and add them to known_hosts."""
    from disagg.cli.views.errors import error_view
    from disagg.fleet.health import select_hosts

    failure: DisaggError | None = None
    for host in select_hosts(settings(context).fleet(), hosts or ()):
        if host.connector == "local":
            stdout().print(f"{host.name}: this machine, no key needed")
            continue
        try:
            _trust(host, yes)
        except UsageError:
            raise
        except DisaggError as error:  # the others are asked about all the same
            stderr().print(error_view(error), soft_wrap=True)
            failure = failure or error
    if failure is not None:
        raise typer.Exit(failure.exit_code)


def _trust(host: Host, yes: bool) -> None:
    from disagg.fleet.trust import offers

    for offer in offers(host):
        place = f"{offer.host} ({offer.known_as})"
        shown = f"{offer.key.kind} {offer.key.fingerprint}"
        if offer.verdict == "known":
            stdout().print(f"{place}: {shown} is known already", soft_wrap=True)
            continue
        stdout().print(f"{place}: {shown}", soft_wrap=True)
        if not yes:
            _ask(offer.host)
        offer.accept()
        stdout().print(f"{place}: added to {offer.path}", soft_wrap=True)


def _ask(host: str) -> None:
    """Return where the person says yes. UsageError without a terminal, exit 1 for a no."""
    if not sys.stdin.isatty():
        raise UsageError(
            "nobody is here to compare the fingerprint",
            f"compare it with the machine's, then: disagg trust --yes {host}",
        )
    stdout().print("Compare it on the machine: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    if not typer.confirm("Is it the machine's own?", default=False):
        raise typer.Exit(1)
