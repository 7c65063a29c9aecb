"""Fuzzing of the KV receiver without sockets: any bytes give a DisaggError or the KV that was sent, in bounded memory.

`python -m tests.faults fuzz` is coverage-guided if atheris is installed; else it damages valid transfers at random.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Final, cast

from disagg.api import layout
from disagg.errors import DisaggError, PeerLost
from disagg.kv import frames, parts, preamble
from disagg.kv.arena import Reservation
from disagg.kv.channel import Channel, OnPiece
from disagg.kv.receive import part
from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from tests.kv.kv_parts import Cache, expected, header_for, mixed_layout, parts_of, stream

CACHE: Final = Cache.random(mixed_layout(), 6)
MAX_KV_BYTES: Final = 1 << 20
MEMORY_MB: Final = 1024
FUNCTIONS: Final = tuple(
    member
    for module in (frames, preamble, parts, layout, part)
    for kind in [module, *(kind for kind in vars(module).values() if isinstance(kind, type))]
    for member in vars(kind).values()
    if isinstance(member, FunctionType) and member.__module__ == module.__name__
)
"""Whose branches guide the fuzzer."""


class MemoryChannel:
    """What `receive_part` uses of a Channel, over bytes that are here; they end as a lost peer."""

    peer = "the fuzzer"
    deadline = idle_s = 0.0

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def read(self, count: int) -> bytes:
        if count > len(self._left):
            self._left = self._left[:0]
            raise PeerLost("the bytes ended")
        piece, self._left = self._left[:count], self._left[count:]
        return bytes(piece)

    def read_into(self, views: Sequence[memoryview], on_piece: OnPiece | None = None) -> None:
        for view in views:
            view[:] = memoryview(self.read(len(view)))
            if on_piece:
                on_piece(view)

    def write(self, views: Sequence[memoryview]) -> bool:
        return bool(views)

    def close_gently(self, linger_s: float) -> None: ...

    def abort(self) -> None: ...


def receive(data: bytes) -> ReceivedKV | DisaggError:
    """The outcome of a connection that sends these bytes with a proven ticket. Whatever else is raised is a bug."""
    tickets, outcomes, memory = Tickets(), list[KVOutcome](), Reservation(MAX_KV_BYTES, lambda nbytes: None)
    slot = _slot(tickets, outcomes, memory)
    try:
        opening = preamble.decode_proof(data[: preamble.PROOF.size].ljust(preamble.PROOF.size, b"\0"))
    except DisaggError as error:
        return error
    channel = MemoryChannel(data[preamble.PROOF.size :])
    tickets.claim(slot.ticket, channel.abort)
    part.receive_part(cast(Channel, channel), slot, opening.header_bytes, tickets, ReceiveLimits())
    tickets.revoke(slot.ticket)
    (outcome,) = outcomes
    if isinstance(outcome, ReceivedKV):
        assert CACHE.matches(outcome), "wrong KV was accepted"
        outcome.release()
    assert not memory.in_use, "memory is still in use"
    return outcome


def valid() -> list[bytes]:
    """Whole transfers, in chunks of several sizes."""
    slot = _slot(Tickets(), [], None)
    return [stream(header_for(slot), parts_of(CACHE, chunk)) for chunk in (1, 2, 6)]


def at_random(rounds: int, seed: int, damage: Callable[[bytes, random.Random], bytes]) -> int:
    """Damaged valid transfers; returns how many were still accepted, which had meaningless bytes damaged."""
    chance, seeds = random.Random(seed), valid()
    return sum(isinstance(receive(damage(chance.choice(seeds), chance)), ReceivedKV) for _ in range(rounds))


def run(minutes: float) -> int:
    """Does not return if atheris is installed: libFuzzer ends the process, with status 0 if nothing was found."""
    logging.disable(logging.CRITICAL)
    if importlib.util.find_spec("atheris") is None:
        return _run_at_random(minutes)
    import atheris

    for function in FUNCTIONS:
        atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(valid()):
            (Path(corpus) / str(number)).write_bytes(data)
        limits = [
            f"-artifact_prefix={tempfile.gettempdir()}/",
            f"-max_total_time={int(minutes * 60)}",
            f"-rss_limit_mb={MEMORY_MB}",
            "-timeout=10",
            "-max_len=8192",
        ]
        atheris.Setup([sys.argv[0], *limits, corpus], lambda data: receive(data) and None)
        atheris.Fuzz()
    return 0


def _run_at_random(minutes: float) -> int:
    from tests.kv.test_fuzz import damaged

    until, rounds = time.monotonic() + minutes * 60, 0
    while time.monotonic() < until:
        at_random(1000, rounds, damaged)
        rounds += 1000
    sys.stdout.write(f"{rounds} damaged transfers, no bug (without coverage: atheris is not installed)\n")
    return 0


def _slot(tickets: Tickets, outcomes: list[KVOutcome], memory: Reservation | None) -> IssuedTicket:
    return tickets.issue(expected(CACHE), outcomes.append, deadline=time.monotonic() + 60, memory=memory)
