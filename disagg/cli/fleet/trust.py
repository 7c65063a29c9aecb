"""`disagg trust`: show hosts' SSH keys, and add confirmed ones to known_hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from disagg.cli.common.change import finish
from disagg.cli.common.completion import complete_host
from disagg.cli.common.context import confirm, print_error, settings, stderr, stdout
from disagg.cli.common.options import AsJson
from disagg.errors import DisaggError, UsageError, exit_code_of_all

if TYPE_CHECKING:
    from disagg.config import Host
    from disagg.fleet.machine.fan_out import HostOutcome
    from disagg.fleet.machine.ssh.connection import HostKeyOffer

Decide = Callable[["HostKeyOffer"], bool]


class TrustResult(NamedTuple):
    """What --json prints of one host, and its exit code."""

    body: dict[str, Any]
    exit_code: int


def trust(
    context: typer.Context,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST", help="Hosts of hosts.toml; without any, all hosts.", autocompletion=complete_host
        ),
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: you have compared the fingerprints.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the SSH host keys of hosts and add those you confirm to known_hosts.

    With --json nothing is asked: without --yes no key is added. Exit code 1: a key was not added; 4: a host cannot be
    reached.
    """
    chosen = settings(context)
    fleet = chosen.fleet()
    selection = {**chosen.selection, "names": [*(hosts or ()), *chosen.selection.get("names", ())]}
    selected = fleet.select(**selection, managed=True)
    decide: Decide = (lambda offer: yes) if yes or as_json else _confirmed
    results = [_handled(outcome, decide, silent=as_json) for outcome in _first_offers(selected)]
    code = exit_code_of_all(result.exit_code for result in results)
    body = {"fleet": fleet.name, "ok": code == 0, "hosts": [result.body for result in results]}
    finish(as_json, body, code=code)


def _first_offers(hosts: list[Host]) -> list[HostOutcome[Iterable[HostKeyOffer]]]:
    """The offers of each host, of which the first has been read."""
    from disagg.fleet.machine.fan_out import each
    from disagg.fleet.machine.ssh.connection import offers

    def first(host: Host) -> Iterable[HostKeyOffer]:
        if not host.server_kind.ssh:
            return ()
        further: Iterator[HostKeyOffer] = offers(host)
        return chain([next(further)], further)

    with stderr().status("reading keys …"):
        return each(hosts, first)


def _handled(outcome: HostOutcome[Iterable[HostKeyOffer]], decide: Decide, *, silent: bool) -> TrustResult:
    """Show the keys, jump hosts first, and add those that `decide` confirms, up to one that is not added: a gateway's
    key comes before the next hop is asked. No key for this machine."""
    name, keys, failed = outcome.host.name, list[dict[str, str]](), None

    def show(line: str) -> None:
        if not silent:  # else stdout has nothing but the object
            _print(line)

    if not outcome.host.server_kind.ssh:
        show(f"{name}: this machine, no key needed")
    try:
        if outcome.error is not None:
            raise outcome.error
        for offer in outcome.value or ():
            keys.append(_decided(offer, decide, show))
            if keys[-1]["state"] == "not added":
                break
    except UsageError:
        raise
    except DisaggError as error:  # go on with the other hosts
        if not silent:
            print_error(error)
        failed = error
    body = {"host": name, "keys": keys, "error": failed.to_json() if failed is not None else None}
    return TrustResult(body, failed.exit_code if failed else int(any(key["state"] == "not added" for key in keys)))


def _decided(offer: HostKeyOffer, decide: Decide, show: Callable[[str], None]) -> dict[str, str]:
    """A key, and what became of it. known_as: its name in known_hosts."""
    known = offer.verdict == "known"
    show(f"{offer.host} ({offer.known_as}){': already known' if known else ''}")
    show(f"  {offer.key.kind} {offer.key.fingerprint}")  # on a line of its own, to be compared by eye
    state = "known" if known else "added" if decide(offer) else "not added"
    if state == "added":
        offer.accept()
        show(f"  added to {offer.path}")
    elif state == "not added":
        show("  not added")
    return {"known_as": offer.known_as, "kind": offer.key.kind, "fingerprint": offer.key.fingerprint, "state": state}


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
