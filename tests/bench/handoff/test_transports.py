"""The transports by themselves, both ends in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest
from msgspec import structs

from disagg.api.layout import uniform
from disagg.bench.handoff import run
from disagg.bench.handoff.channel import ROUND_TIMEOUT_S, MessageChannel
from disagg.bench.handoff.transports import (
    HandoffReceiver,
    JSONReceiver,
    JSONSender,
    RandomKV,
    ReceiverOffer,
)
from disagg.engines.synthetic import SyntheticKV
from disagg.errors import IntegrityError, PeerLost
from disagg.kv.receive.tickets import IssuedTicket

SHAPE = RandomKV(uniform((None,), 1, 8, "float32"), 4)


@pytest.fixture
def receiver() -> Iterator[JSONReceiver]:
    receiver = JSONReceiver(SHAPE, "127.0.0.1")
    yield receiver
    receiver.close()


def test_the_http_transport_accepts_nothing_without_the_key(receiver: JSONReceiver) -> None:
    offer = receiver.offer()
    receiver.accept()
    url = f"http://127.0.0.1:{offer.port}/layer"
    layer = {"keys": "AAAA", "values": "AAAA"}
    for key in (b"", b"Bearer x", "Bearer é".encode()):
        headers = {b"Authorization": key} if key else {}
        assert httpx.post(url, json=layer, headers=headers, trust_env=False).status_code == 401

    sender = JSONSender(SHAPE, SyntheticKV(SHAPE.layout, SHAPE.tokens, "cpu"))
    sender.prepare(offer)
    sender.send()
    sender.close()
    assert len(receiver.receive()) == 2


def test_an_http_server_that_refuses_is_a_lost_peer(receiver: JSONReceiver) -> None:
    sender = JSONSender(SHAPE, SyntheticKV(SHAPE.layout, SHAPE.tokens, "cpu"))
    sender.prepare(structs.replace(receiver.offer(), key="wrong"))
    with pytest.raises(PeerLost, match="401"):
        sender.send()
    sender.close()


def test_a_ticket_lasts_for_a_whole_round_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = HandoffReceiver(SHAPE, "127.0.0.1")
    deadlines: list[float] = []
    issue = receiver._tickets.issue

    def recorded(*arguments: Any, deadline: float) -> IssuedTicket:
        deadlines.append(deadline)
        return issue(*arguments, deadline=deadline)

    monkeypatch.setattr(receiver._tickets, "issue", recorded)
    before = time.monotonic()
    receiver.offer()
    receiver.close()
    assert deadlines[0] >= before + ROUND_TIMEOUT_S


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


class MovesOnce:
    """Both ends of a broken transport: it moves the bytes once and never again, in memory that every round reuses."""

    def __init__(self, source: SyntheticKV) -> None:
        self._source = source
        self._memory = [numpy.array(tensor) for tensor in source.flat()]

    def offer(self) -> ReceiverOffer:
        return ReceiverOffer(host="", port=0)

    def prepare(self, offer: ReceiverOffer) -> None: ...

    def accept(self) -> None: ...

    def send(self) -> None: ...

    def receive(self) -> Any:
        return self._memory

    def close(self) -> None: ...


def test_bytes_of_one_round_do_not_pass_for_bytes_of_the_next() -> None:
    source = SyntheticKV(SHAPE.layout, SHAPE.tokens, "cpu")
    transport, digest = MovesOnce(source), run._digest(source.flat())
    ends = connected()
    with MessageChannel(ends[0]) as here, MessageChannel(ends[1]) as there:

        def receive() -> None:
            for _ in range(2):
                run._receive_once(there, transport)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        run._send_once(here, transport, digest)
        with pytest.raises(IntegrityError, match="not the KV that was sent"):
            run._send_once(here, transport, digest)
        thread.join(30)


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"[]\n", b"\xff\xfe\n", b"{}", b"{}\n", b'{"host": "h", "port": "x"}\n']
)
def test_a_line_that_is_not_the_expected_message_is_a_lost_peer(line: bytes) -> None:
    ends = connected()
    with ends[0], MessageChannel(ends[1]) as there:
        ends[0].sendall(line)
        ends[0].shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost):
            there.receive(ReceiverOffer)


def test_an_error_of_one_end_reaches_the_other() -> None:
    ends = connected()
    with MessageChannel(ends[0]) as here, MessageChannel(ends[1]) as there:
        here.send_error(MemoryError("no memory for 9 bytes"))
        with pytest.raises(PeerLost, match="failed: no memory for 9 bytes"):
            there.receive(ReceiverOffer)
