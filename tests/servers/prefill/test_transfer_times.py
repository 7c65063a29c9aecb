"""What a prefill host states about a transfer, over links faster and slower than its prefill: simulated machines, and a
relay that passes so many bytes per second."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from disagg.kv import transfer
from disagg.kv.receive import KVServer
from disagg.kv.receive.tickets import Tickets
from disagg.kv.received import ReceivedKV
from disagg.servers.prefill.service import PrefillService
from tests.servers.prefill.test_service import PATIENCE_S, Receiver, address, serving, shipped
from tests.simulated import ROW_BYTES
from tests.values import of_type

SLICE_S = 0.005
BUFFER_BYTES = 1 << 16
TOKENS = 2000
PROMPT = list(range(TOKENS + 1))
PREFILL_S = 0.13  # of these tokens on an M4 Max, predicted
KV_BYTES = ROW_BYTES * TOKENS


@dataclass(slots=True)
class Relay:
    """A link of so many bytes per second between a port and another one. began, ended: its first and last piece."""

    listener: socket.socket
    target: int
    rate: float
    began: float = 0.0
    ended: float = 0.0

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target), PATIENCE_S)
                for job in (partial(self._pass_on, near, far), partial(_copy, far, near)):
                    threading.Thread(target=job, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        most, due = max(1, int(self.rate * SLICE_S)), time.monotonic()
        with suppress(OSError), source, target:
            while data := source.recv(min(most, BUFFER_BYTES)):
                self.began = self.began or time.monotonic()
                target.sendall(data)
                due = max(due, time.monotonic() - SLICE_S) + len(data) / self.rate
                time.sleep(max(0.0, due - time.monotonic()))
                self.ended = time.monotonic()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(BUFFER_BYTES):
            target.sendall(data)


@contextmanager
def linked(service: PrefillService, rate: float) -> Iterator[tuple[Receiver, Relay]]:
    """The KV port of the decode host, behind a link of this rate."""
    to, tickets = address(service, "m-decode"), Tickets()
    with socket.socket() as listener, KVServer("127.0.0.1", 0, tickets) as server:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listener.bind((to.host, to.port))
        listener.listen()
        relay = Relay(listener, server.port, rate)
        threading.Thread(target=relay.run, daemon=True).start()
        try:
            yield Receiver(service, to, tickets, queue.Queue()), relay
        finally:
            listener.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def slow_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PrefillService]:
    """A prefill host that waits for its link when 1 MiB waits to be sent: an eighth of the prompt's KV."""
    monkeypatch.setattr(transfer, "SEND_BUFFER_BYTES", BUFFER_BYTES)
    async with serving(tmp_path, "m4-max") as service:
        service.scheduler.policy = replace(service.scheduler.policy, behind_bytes=1 << 20)
        yield service


@pytest.mark.parametrize("share", [5.0, 2.2, 0.5], ids=["1 Gb/s", "2.5 Gb/s", "10 Gb/s"])
async def test_hidden_and_exposed_are_the_transfer_and_no_part_is_longer_than_what_it_is_of(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """share: of the prefill that the transfer takes, as of Llama 3.1 8B's KV from a DGX Spark over such links."""
    async with slow_prefill(tmp_path, monkeypatch) as service:
        with linked(service, KV_BYTES / (share * PREFILL_S)) as (receiver, relay):
            began = time.monotonic()
            event = await shipped(service, receiver.body(PROMPT))
            took = time.monotonic() - began
            of_type(receiver.outcomes.get(timeout=PATIENCE_S), ReceivedKV).release()
    assert event.kv_bytes == KV_BYTES
    assert 0 < event.hidden_transfer_s <= event.compute_s
    parts = event.tokenise_s + event.queue_s + event.compute_s + event.exposed_transfer_s
    assert min(event.queue_s, event.exposed_transfer_s) >= 0 and parts <= took
    if share > 1:  # the link never waits for KV once it has some
        sent = event.hidden_transfer_s + event.exposed_transfer_s
        assert 0.7 * (relay.ended - relay.began) <= sent <= took  # the relay may be late, as on a busy machine
        assert event.exposed_transfer_s > event.hidden_transfer_s
        assert event.queue_s < event.exposed_transfer_s, "nobody else is here"


async def test_a_prompt_that_waits_for_its_turn_does_not_wait_for_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, of which one goes to a host that takes KV faster than it is computed."""
    async with slow_prefill(tmp_path, monkeypatch) as service:
        with linked(service, 100 * KV_BYTES / PREFILL_S) as (receiver, _):
            first, second = receiver.body(PROMPT), receiver.body([9, *PROMPT])
            events = await asyncio.gather(shipped(service, first), shipped(service, second))
            for _ in events:
                of_type(receiver.outcomes.get(timeout=PATIENCE_S), ReceivedKV).release()
    assert sum(event.queue_s for event in events) > 0.5 * min(event.compute_s for event in events)
    assert all(event.hidden_transfer_s <= event.compute_s for event in events)
