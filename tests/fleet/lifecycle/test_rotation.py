"""The fleet's token is replaced host by host: nobody is refused meanwhile, and a rotation that broke off goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.config import Host
from disagg.errors import FleetError, HostUnreachable
from disagg.fleet.lifecycle.rotation import Rotation
from disagg.fleet.lifecycle.status.health import poll_host
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.local import LocalMachine
from disagg.token import read_tokens
from tests.fleet.lifecycle.yard import Yard


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


def rotation(yard: Yard, connect: Callable[[Host], Machine] | None = None, accept_s: float = 60.0) -> Rotation:
    connect = connect or (lambda host: LocalMachine(host.name))
    return Rotation(yard.fleet, yard.state, connect=connect, accept_s=accept_s)


@pytest.fixture
def deployed(yard: Yard) -> Yard:
    for name in yard.fleet.hosts:
        yard.deploy(name)
        (yard.own(name) / "token").chmod(0o600)
    return yard


def test_no_caller_is_refused_while_the_token_is_replaced(deployed: Yard) -> None:
    old, refused, seen = deployed.state.token(), list[str](), set[str]()
    deployed.lifecycle().start()

    def everybody_calls() -> None:
        """This machine, and a gateway on each host."""
        current = {deployed.state.token(), *(tokens[0] for tokens in tokens_there(deployed).values())}
        seen.update(current)
        for host in deployed.fleet.hosts.values():
            states = {poll_host(host, token, deployed.state, 60.0).state for token in current}
            refused.extend(states - {"healthy"})

    def connect(host: Host) -> Machine:
        return Written(host.name, lambda: None, everybody_calls)

    new = rotation(deployed, connect).run()
    everybody_calls()
    assert refused == [] and seen == {old, new} and new != old
    assert set(tokens_there(deployed).values()) == {(new,)} == {deployed.state.tokens()}
    assert poll_host(deployed.fleet.hosts["a"], old, deployed.state, 60.0).state == "unauthorised"


@pytest.mark.parametrize("broken_at", range(1, 7))
def test_broken_off_at_any_write_it_goes_on_to_the_same_new_token(deployed: Yard, broken_at: int) -> None:
    old, count = deployed.state.token(), [0]

    def fail() -> None:
        count[0] += 1
        if count[0] == broken_at:
            raise HostUnreachable("the connection is lost")

    with pytest.raises(HostUnreachable) as lost:
        rotation(deployed, lambda host: Written(host.name, fail, lambda: None)).run()
    assert "disagg token rotate" in lost.value.hint
    shown = {deployed.state.token(), *(held[0] for held in tokens_there(deployed).values())}
    for name, tokens in tokens_there(deployed).items():
        assert shown <= set(tokens), f"{name} accepts what anybody shows"
    known = {token for tokens in tokens_there(deployed).values() for token in tokens}
    assert rotation(deployed).begun
    new = rotation(deployed).run()
    assert new != old and known <= {old, new}
    assert set(tokens_there(deployed).values()) == {(new,)} == {deployed.state.tokens()}
    assert not rotation(deployed).begun and not deployed.state.token_file.with_name("token.next").exists()


def test_a_server_that_reads_its_token_once_stops_the_rotation_and_is_left_as_it_was(deployed: Yard) -> None:
    deployed.deploy("a", "early", release="b" * 16)
    (deployed.own("a") / "token").chmod(0o600)
    deployed.lifecycle().start()
    before = deployed.state.tokens()
    with pytest.raises(FleetError, match="a: its server does not accept a token that was added") as refused:
        rotation(deployed, accept_s=0.0).run()
    assert "disagg deploy --host a && disagg restart --host a" in refused.value.hint
    assert tokens_there(deployed)["a"] == before == deployed.state.tokens()
    assert deployed.states() == {"a": "healthy", "b": "healthy"}


def test_a_host_that_does_not_answer_stops_it_before_anything_is_taken_away(deployed: Yard) -> None:
    def connect(host: Host) -> Machine:
        if host.name == "b":
            raise HostUnreachable("b: no route", "ping b")
        return LocalMachine(host.name)

    old = deployed.state.token()
    with pytest.raises(HostUnreachable):
        rotation(deployed, connect).run()
    assert deployed.state.tokens() == (old,) == tokens_there(deployed)["b"] and tokens_there(deployed)["a"][0] == old


def test_a_host_without_a_deployment_is_left_out_and_this_machines_file_stays_private(deployed: Yard) -> None:
    for path in (deployed.own("b") / "token", deployed.own("b") / "current"):
        path.unlink()
    new = rotation(deployed).run()
    assert read_tokens(deployed.own("a") / "token") == (new,) and not (deployed.own("b") / "token").exists()
    assert deployed.state.token_file.read_text() == f"{new}\n"
    assert deployed.state.token_file.stat().st_mode & 0o777 == 0o600
