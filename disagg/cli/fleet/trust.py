"""`disagg trust`: show hosts' SSH keys, and add confirmed ones to known_hosts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.completion import complete_host
from disagg.cli.common.context import confirm, print_error, settings, stdout
from disagg.errors import DisaggError, UsageError, exit_code_of_all

if TYPE_CHECKING:
    from disagg.config import Host
    from disagg.fleet.machine.ssh.trust import HostKeyOffer


def trust(
    context: typer.Context,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST", help="Hosts of hosts.toml; without any, all hosts.", autocompletion=complete_host
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: you have compared the fingerprints.")] = False,
) -> None:
    """Show the SSH host keys of hosts and add those you confirm to known_hosts.

    Exit code 1: a key was not added; 4: a host cannot be reached.
    """

    codes: set[int] = set()
    chosen = settings(context)
    selection = {**chosen.selection, "names": [*(hosts or ()), *chosen.selection.get("names", ())]}
    for host in chosen.fleet().select(**selection, managed=True):
        if not host.placement.ssh:
            stdout().print(f"{host.name}: this machine, no key needed")
            continue
        try:
            if not _trust(host, yes):
                codes.add(1)
        except UsageError:
            raise
        except DisaggError as error:  # go on with the other hosts
            print_error(error)
            codes.add(error.exit_code)
    if codes:
        raise typer.Exit(exit_code_of_all(codes))


def _trust(host: Host, yes: bool) -> bool:
    """Whether all keys are known now: the host's own, and those of its jump hosts."""
    from disagg.fleet.machine.ssh.trust import offers

    for offer in offers(host):
        known = offer.verdict == "known"
        _print(f"{offer.host} ({offer.known_as}){': already known' if known else ''}")
        _print(f"  {offer.key.kind} {offer.key.fingerprint}")  # on a line of its own, to be compared by eye
        if known:
            continue
        if not yes and not _confirmed(offer):
            _print("  not added")
            return False
        offer.accept()
        _print(f"  added to {offer.path}")
    return True


def _print(line: str) -> None:
    stdout().print(line, soft_wrap=True, markup=False)


def _confirmed(offer: HostKeyOffer) -> bool:
    """Whether the user confirms the key. UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "a fingerprint must be compared, and stdin is no terminal",
            f"compare it with the machine's, then: disagg trust --yes {offer.host}",
        )
    kind = next(kind for kind in ("ed25519", "ecdsa", "rsa", "*") if kind in offer.key.kind or kind == "*")
    _print(f"  compare it on the machine: ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub")
    return confirm("  is it the same?", stdout())
