"""`disagg token show | rotate | certificate`: the fleet's secret, on this machine and on the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from disagg.cli.common.change import Change
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.hosts import FanOutCommand, HostCommand
from disagg.cli.common.options import AsJson, BreakLock, Command, Yes, command_group
from disagg.config import Fleet, Host
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll_host, refusal
from disagg.fleet.machine import connect
from disagg.fleet.tokens.rotation import Rotation
from disagg.fleet.tokens.there import KnownTokens, foreign_token, known_tokens, shown
from disagg.tls.certificate import certificate_pem
from disagg.token import fleet_token, token_digest

token = command_group("token", "Show and replace the secret that the fleet's servers need.")


@token.command(cls=HostCommand)
def show(
    context: typer.Context,
    *,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Print this machine's token itself, and nothing else.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which token this machine and the hosts have, by the first 8 digits of its hash.

    Exit code 1: a host has none of this machine's; 4: a host cannot be reached.
    """
    fleet = settings(context).fleet()
    state = State.of(fleet)
    if reveal:
        current = state.tokens.current
        print_json({"token": current}) if as_json else typer.echo(current)
        return
    hosts = deployed(fleet, settings(context).names(fleet, managed=True))
    ours, known = state.tokens.all, read_tokens(hosts)
    theirs = {name: [token_digest(one) for one in tokens] for name, tokens in known.by_host.items()}
    foreign = [name for name, digests in theirs.items() if foreign_token(ours, digests, name)]
    if as_json:
        errors = {name: error.to_json() for name, error in known.missing.items()}
        here = [token_digest(one) for one in ours]
        print_json({"fleet": fleet.name, "here": here, "hosts": theirs, "errors": errors})
    else:
        print_line = stdout().print
        print_line(f"this machine: {shown(ours)}  {state.tokens.path}", soft_wrap=True, highlight=False)
        for name in (host.name for host in hosts):
            tokens = known.by_host.get(name, ())
            what = known.missing[name].message if name in known.missing else shown(tokens) or "none"
            note = "  not this machine's" if name in foreign else ""
            print_line(f"{name}: {what}{note}", soft_wrap=True, highlight=False)
        if state.tokens.next is not None:
            stderr().print("a rotation has begun: disagg token rotate")
        elif len(ours) > 1:
            stderr().print(f"disagg token rotate removes {shown(ours[1:])}")
    if known.missing or foreign:
        raise typer.Exit(4 if known.missing else 1)


@token.command(cls=FanOutCommand)
def rotate(context: typer.Context, *, yes: Yes = False, break_lock: BreakLock = False, as_json: AsJson = False) -> None:
    """Replace the fleet's token while it serves: both are valid until every host and caller has the new one.

    All hosts must answer. An interrupted rotation goes on with the next call. Other machines that have the old token
    need the new one: `disagg deploy --adopt-token` there. A file that hosts.toml or $DISAGG_TOKEN_FILE names is
    rewritten: other fleets that name it need the new token too.
    """
    fleet = settings(context).fleet()
    state = State.of(fleet)
    rotation = Rotation(
        fleet,
        state.tokens,
        state.locked,
        lambda host, token: refusal(host, poll_host(host, token, state), state),
        lambda host, done: stderr().print(f"{host}: {done}", highlight=False),
        break_lock=break_lock,
    )
    change = Change("token rotate", yes=yes, as_json=as_json)
    change.ask(_question(fleet, state))
    before, after = map(token_digest, rotation.run())
    text = f"the token is {after[:8]} now, and {before[:8]} is no longer accepted"
    change.finish({"fleet": fleet.name, "before": before, "token": after}, text, code=0)


@token.command(cls=Command)
def certificate(context: typer.Context, *, as_json: AsJson = False) -> None:
    """Print the certificate of the fleet's servers, for other HTTP clients such as curl.

    It follows from the token and is no secret. With --cacert, curl accepts only servers that have the token.
    """
    pem = certificate_pem(fleet_token(settings(context).fleet()))
    if as_json:
        print_json({"certificate": pem})
    else:
        typer.echo(pem, nl=False)


def _question(fleet: Fleet, state: State) -> str:
    current, *others = state.tokens.all
    if state.tokens.next is not None:
        return "Go on with the rotation?"
    if others:
        return f"Remove the token {shown(others)} of {fleet.name}, so that only {shown([current])} is accepted?"
    return f"Replace the token {shown([current])} of {fleet.name} in {state.tokens.path}?"


def deployed(fleet: Fleet, names: Sequence[str] = ()) -> list[Host]:
    """The hosts with a token of their own. names: of the selected hosts; none if all are meant."""
    return [host for host in fleet.deployed_hosts if not names or host.name in names]


def read_tokens(hosts: Sequence[Host]) -> KnownTokens:
    """The tokens of these hosts."""
    with stderr().status("reading tokens …"):
        return known_tokens(hosts, connect.machine_for)
