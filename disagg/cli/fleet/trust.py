"""`disagg trust`: show hosts' SSH keys, and add them to known_hosts when a person says so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.completion import complete_host
from disagg.cli.context import confirm, print_error, settings, stdout
from disagg.errors import DisaggError, UsageError

if TYPE_CHECKING:
    from disagg.config import Host
    from disagg.fleet.machine.ssh.trust import Offer


def trust(
    context: typer.Context,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST", help="Names of hosts.toml; all hosts without any.", autocompletion=complete_host
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: the fingerprints were compared.")] = False,
) -> None:
    """Show the SSH host keys of hosts and add them to known_hosts.

    Exit code 1: a key was not added; 4: a host cannot be reached.
    """

    codes: set[int] = set()
    for host in settings(context).fleet().select(hosts or ()):
        if host.local:
            stdout().print(f"{host.name}: this machine, no key needed")
            continue
        try:
            if not _trust(host, yes):
                codes.add(1)
        except UsageError:
            raise
        except DisaggError as error:  # the others are asked about all the same
            print_error(error)
            codes.add(error.exit_code)
    if codes:
        raise typer.Exit(4 if 4 in codes else 1)


def _trust(host: Host, yes: bool) -> bool:
    """Whether all of its keys are known now: its own, and those of the hosts it is reached through."""
    from disagg.fleet.machine.ssh.trust import offers

    for offer in offers(host):
        known = offer.verdict == "known"
        _say(f"{offer.host} ({offer.known_as}){': known already' if known else ''}")
        _say(f"  {offer.key.kind} {offer.key.fingerprint}")  # a line of its own: it is to be compared by eye
        if known:
            continue
        if not yes and not _confirmed(offer):
            _say("  not added")
            return False
        offer.accept()
        _say(f"  added to {offer.path}")
    return True


def _say(line: str) -> None:
    stdout().print(line, soft_wrap=True, markup=False)


def _confirmed(offer: Offer) -> bool:
    """Whether a person says yes. UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "nobody is here to compare the fingerprint",
            f"compare it with the machine's, then: disagg trust --yes {offer.host}",
        )
    kind = next(kind for kind in ("ed25519", "ecdsa", "rsa", "*") if kind in offer.key.kind or kind == "*")
    _say(f"  compare it on the machine: ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub")
    return confirm("  is it the machine's own?", stdout())
