"""The fleet's token is replaced host by host: nobody is refused meanwhile, and a rotation that broke off goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from disagg.config import Host
from disagg.errors import FleetError, HostLocked, HostUnreachable
from disagg.fleet.lifecycle.status.ask import poll_host, refusal
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.machine import interruption
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Machine
from disagg.fleet.tokens.here import OwnTokens
from disagg.fleet.tokens.rotation import GRACE_S, Rotated, Rotation
from disagg.http.protocol import ConnectionBounds
from disagg.token import read_tokens
from tests.fleet.yards import Yard


class Written(LocalMachine):
    """A machine that reports each write, before it and after it."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__(name)
        self._before, self._after = before, after

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._before()
        super().write(path, content, mode=mode)
        self._after()


def tokens_there(yard: Yard) -> dict[str, tuple[str, ...]]:
    return {name: read_tokens(yard.own(name) / "token") for name in yard.fleet.hosts}


def rotation(yard: Yard, connect: Callable[[Host], Machine] | None = None) -> Rotation:
    connect = connect or (lambda host: LocalMachine(host.name))
    return Rotation(
        yard.fleet,
        yard.state.tokens,
        yard.state.locked,
        lambda host, token: refusal(host, poll_host(host, token, yard.state, 60.0), yard.state),
        connect=connect,
        accept_s=60.0,
        grace_s=0.0,
    )


@pytest.fixture
def deployed(yard: Yard) -> Yard:
    for name in yard.fleet.hosts:
        yard.deploy(name)
    return yard


def test_no_caller_is_refused_while_the_token_is_replaced(deployed: Yard) -> None:
    old, refused, seen = deployed.state.tokens.current, list[str](), set[str]()
    deployed.lifecycle().start()

    def everybody_calls() -> None:
        """This machine, and a gateway on each host."""
        current = {deployed.state.tokens.current, *(tokens[0] for tokens in tokens_there(deployed).values())}
        seen.update(current)
        for host in deployed.fleet.hosts.values():
            states = {poll_host(host, token, deployed.state, 60.0).state for token in current}
            refused.extend(states - {"healthy"})

    def connect(host: Host) -> Machine:
        return Written(host.name, lambda: None, everybody_calls)

    before, new = rotation(deployed, connect).run()
    everybody_calls()
    assert before == old
    assert refused == [] and seen == {old, new} and new != old
    assert set(tokens_there(deployed).values()) == {(new,)} == {deployed.state.tokens.all}
    assert poll_host(deployed.fleet.hosts["a"], old, deployed.state, 60.0).state == "unauthorised"


@pytest.mark.parametrize("broken_at", range(1, 7))
def test_broken_off_at_any_write_it_goes_on_to_the_same_new_token(deployed: Yard, broken_at: int) -> None:
    writes = count(1)  # several threads take from it

    def fail() -> None:
        if next(writes) == broken_at:
            raise HostUnreachable("the connection is lost")

    old = deployed.state.tokens.current
    with pytest.raises(HostUnreachable) as lost:
        rotation(deployed, lambda host: Written(host.name, fail, lambda: None)).run()
    assert "disagg token rotate" in lost.value.hint
    goes_on(deployed, old)


@pytest.mark.parametrize(("method", "broken_at"), [("write", 1), ("write", 2), ("write", 3), ("drop_next", 1)])
def test_broken_off_at_any_write_of_this_machine_it_goes_on_too(
    deployed: Yard, monkeypatch: pytest.MonkeyPatch, method: str, broken_at: int
) -> None:
    old, real, calls = deployed.state.tokens.current, getattr(OwnTokens, method), count(1)

    def fail(own: OwnTokens, *arguments: object) -> None:
        if next(calls) == broken_at:
            raise FleetError("the disk is full")
        real(own, *arguments)

    with monkeypatch.context() as broken, pytest.raises(FleetError):
        broken.setattr(OwnTokens, method, fail)
        rotation(deployed).run()
    goes_on(deployed, old)


def goes_on(deployed: Yard, old: str) -> None:
    """Everybody accepts what anybody shows, and the next rotation makes the same new token current."""
    shown = {deployed.state.tokens.current, *(held[0] for held in tokens_there(deployed).values())}
    for name, tokens in tokens_there(deployed).items():
        assert shown <= set(tokens), f"{name} accepts what anybody shows"
    known = {token for tokens in tokens_there(deployed).values() for token in tokens}
    before, new = rotation(deployed).run()
    assert before == old != new and known <= {old, new}
    assert set(tokens_there(deployed).values()) == {(new,)} == {deployed.state.tokens.all}
    assert deployed.state.tokens.next is None


def test_a_server_that_reads_its_token_once_stops_the_rotation_and_is_left_as_it_was(deployed: Yard) -> None:
    deployed.deploy("a", "early", release="b" * 16)
    (deployed.own("a") / "token").chmod(0o600)
    deployed.lifecycle().start()
    before = deployed.state.tokens.all
    with pytest.raises(FleetError, match="a: its server does not accept a token that was added") as refused:
        replace(rotation(deployed), accept_s=0.0).run()
    assert "disagg deploy --host a && disagg restart --host a" in refused.value.hint
    assert tokens_there(deployed)["a"] == before == deployed.state.tokens.all
    assert deployed.states() == {"a": "healthy", "b": "healthy"}


def test_a_host_that_does_not_answer_stops_it_before_anything_is_taken_away(deployed: Yard) -> None:
    def connect(host: Host) -> Machine:
        if host.name == "b":
            raise HostUnreachable("b: no route", "ping b")
        return LocalMachine(host.name)

    old = deployed.state.tokens.current
    with pytest.raises(HostUnreachable):
        rotation(deployed, connect).run()
    assert deployed.state.tokens.all == (old,) == tokens_there(deployed)["b"] and tokens_there(deployed)["a"][0] == old


def test_a_host_without_a_deployment_is_left_out_and_this_machines_file_stays_private(deployed: Yard) -> None:
    for path in (deployed.own("b") / "token", deployed.own("b") / "current"):
        path.unlink()
    new = rotation(deployed).run().current
    assert read_tokens(deployed.own("a") / "token") == (new,) and not (deployed.own("b") / "token").exists()
    assert deployed.state.tokens.path.read_text() == f"{new}\n"
    assert deployed.state.tokens.path.stat().st_mode & 0o777 == 0o600


def unseen(yard: Yard) -> Rotation:
    """From a machine that reaches the hosts by SSH only."""

    def refuses(host: Host, token: str) -> FleetError | None:
        status = HostStatus(host.name, host.roles, host.model, host.url, "unreachable", "no route", "ping it")
        return refusal(host, status, yard.state)

    return replace(rotation(yard), refuses=refuses, accept_s=0.0)


def test_a_server_that_runs_and_cannot_be_asked_stops_the_rotation(deployed: Yard) -> None:
    before = deployed.state.tokens.all
    deployed.lifecycle().start()
    with pytest.raises(FleetError, match="cannot see whether it accepts the new token: no route"):
        unseen(deployed).run()
    assert set(tokens_there(deployed).values()) == {before} == {deployed.state.tokens.all}


def test_a_server_that_does_not_run_need_not_be_asked(deployed: Yard) -> None:
    _, new = unseen(deployed).run()
    assert set(tokens_there(deployed).values()) == {(new,)}


def test_a_check_that_fails_when_a_rotation_goes_on_takes_no_token_away_that_is_shown_elsewhere(deployed: Yard) -> None:
    old, both = deployed.state.tokens.current, ("a-new-token-of-the-fleet", deployed.state.tokens.current)
    deployed.lifecycle().start()
    for name in deployed.fleet.hosts:
        (deployed.own(name) / "token").write_text("".join(f"{token}\n" for token in both))
    deployed.state.tokens.path.with_name("token.next").write_text(f"{both[0]}\n")
    deployed.state.tokens.path.with_name("token.next").chmod(0o600)
    with pytest.raises(FleetError):
        unseen(deployed).run()
    assert set(tokens_there(deployed).values()) == {both} and deployed.state.tokens.all == (old,)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_old_token_is_accepted_until_the_heads_of_all_requests_that_show_it_were_read(
    deployed: Yard, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert {*tokens_there(deployed).values()} == {deployed.state.tokens.all} and len(deployed.state.tokens.all) == 2
        if resumed and len(waits) == 1:
            raise HostUnreachable("the connection is lost")

    monkeypatch.setattr(interruption, "sleep", wait)
    if resumed:
        with pytest.raises(HostUnreachable):
            replace(rotation(deployed), grace_s=GRACE_S).run()
    assert replace(rotation(deployed), grace_s=GRACE_S).run().current == deployed.state.tokens.current
    assert set(waits) == {GRACE_S} and ConnectionBounds().head_s < GRACE_S


def test_a_fleet_that_another_operator_has_given_another_token_is_left_alone_and_no_rotation_has_begun(
    deployed: Yard,
) -> None:
    """Begun, every command here would say that it is not finished, and it could not be."""
    for name in deployed.fleet.hosts:
        (deployed.own(name) / "token").write_text("the-token-of-another-operator\n")
    before = tokens_there(deployed)
    with pytest.raises(FleetError, match="of another operator") as refused:
        rotation(deployed).run()
    assert "--adopt-token" in refused.value.hint and "go on with" not in refused.value.hint
    assert not deployed.state.tokens.rotating and tokens_there(deployed) == before


def test_two_clones_of_one_fleet_rotate_one_after_the_other(deployed: Yard, tmp_path: Path) -> None:
    clone = replace(deployed.state, folder=tmp_path / "clone")

    def connect(host: Host) -> Machine:
        with (
            clone.locked("token rotate"),
            pytest.raises(HostLocked, match=r"locked on this machine: .* for `disagg token rotate` since"),
            clone.tokens.locked("token rotate"),
        ):
            pass
        return LocalMachine(host.name)

    old = deployed.state.tokens.current
    assert rotation(deployed, connect).run() == Rotated(old, deployed.state.tokens.current)


def test_a_token_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (tmp_path / "token").symlink_to(mounted / "secret")
    OwnTokens(tmp_path / "token").write(("a-token-of-this-very-fleet",))
    assert (tmp_path / "token").is_symlink() and read_tokens(mounted / "secret") == ("a-token-of-this-very-fleet",)
