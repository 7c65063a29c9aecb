"""The ways by themselves, both ends in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest

from disagg.bench.handoff import run
from disagg.bench.handoff.control import Control
from disagg.bench.handoff.handoff import HandoffReceiver
from disagg.bench.handoff.http_json import JSONReceiver, JSONSender
from disagg.bench.handoff.way import LONG_S, Shape
from disagg.engines.simulated.model import layout_of
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.errors import IntegrityError, PeerLost

SHAPE = Shape(layout_of([None], 1, 8, "float32"), 4)


@pytest.fixture
def receiver() -> Iterator[JSONReceiver]:
    receiver = JSONReceiver(SHAPE, "127.0.0.1")
    yield receiver
    receiver.close()


def test_the_http_way_takes_nothing_from_a_stranger(receiver: JSONReceiver) -> None:
    offer = receiver.offer()
    receiver.accept()
    url = f"http://127.0.0.1:{offer['port']}/layer"
    layer = {"keys": "AAAA", "values": "AAAA"}
    for authorization in ("", "Bearer x", "Bearer é"):
        headers = {b"Authorization": authorization.encode()}
        assert httpx.post(url, json=layer, headers=headers, trust_env=False).status_code == 401

    sender = JSONSender(SHAPE, SyntheticKV(SHAPE.layout, SHAPE.tokens, "cpu"))
    sender.prepare(offer)
    sender.send()
    sender.close()
    assert len(receiver.receive()) == 2


def test_an_http_server_that_refuses_is_a_lost_peer(receiver: JSONReceiver) -> None:
    sender = JSONSender(SHAPE, SyntheticKV(SHAPE.layout, SHAPE.tokens, "cpu"))
    sender.prepare({**receiver.offer(), "key": "wrong"})
    with pytest.raises(PeerLost, match="401"):
        sender.send()
    sender.close()


def test_a_ticket_lasts_for_a_whole_turn_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = HandoffReceiver(SHAPE, "127.0.0.1")
    deadlines: list[float] = []
    issue = receiver._tickets.issue

    def noted(*arguments: Any, deadline: float) -> Any:
        deadlines.append(deadline)
        return issue(*arguments, deadline=deadline)

    monkeypatch.setattr(receiver._tickets, "issue", noted)
    before = time.monotonic()
    receiver.offer()
    receiver.close()
    assert deadlines[0] >= before + LONG_S


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


class Forgetful:
    """Moves the bytes once and never again, in memory that is used over and over: both ends of a broken way."""

    def __init__(self, source: SyntheticKV) -> None:
        self._source = source
        self._memory = [numpy.array(tensor) for tensor in source.flat()]

    def offer(self) -> dict[Any, Any]:
        return {}

    def prepare(self, offer: Any) -> None: ...

    def accept(self) -> None: ...

    def send(self) -> None: ...

    def receive(self) -> Any:
        return self._memory


def test_bytes_that_came_once_do_not_pass_for_bytes_that_came_again() -> None:
    source = SyntheticKV(SHAPE.layout, SHAPE.tokens, "cpu")
    way: Any = Forgetful(source)
    digest = run._digest(source.flat())
    ends = connected()
    with Control(ends[0]) as here, Control(ends[1]) as there:

        def receive() -> None:
            for _ in range(2):
                run._receive_once(there, way)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        run._send_once(here, way, digest)
        with pytest.raises(IntegrityError, match="not the KV that was sent"):
            run._send_once(here, way, digest)
        thread.join(10)


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b"\xff\xfe\n", b"{}"])
def test_words_that_are_none_are_a_lost_peer(line: bytes) -> None:
    ends = connected()
    with ends[0], Control(ends[1]) as there:
        ends[0].sendall(line)
        ends[0].shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost):
            there.hear()
