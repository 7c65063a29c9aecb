"""A split between two simulated engines over loopback: the head sends, the tail computes meanwhile, and the answer is
that of each engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest
from disagg.engines.base.decode import Collector
from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.kv.arena import Arenas
from disagg.kv.arriving import ArrivingKV
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import Tickets
from disagg.kv.transfer import Transfer
from disagg.planning.split import SplitPair, split
from disagg.planning.times import Link
from tests.deadlines import wait_until
from tests.simulated import write_config

LAYERS = 8
PATIENCE_S = 60.0
OPTIONS = EngineOptions("simulated", chunk_tokens=64)
SAMPLING = Sampling(max_tokens=12)


@dataclass
class Pair:
    """A head and a tail, and the KV server between them."""

    head: SimulatedPrefillEngine
    tail: SimulatedDecodeEngine
    tickets: Tickets
    server: KVServer

    def submit(self, tokens: list[int], layers: int, chunks: int | None = None) -> Collector:
        """Let the tail answer. The head computes meanwhile; chunks: so many, then it is cut off; None: all."""
        info, count, deadline = self.tail.info, len(tokens) - 1, time.monotonic() + PATIENCE_S
        expected = Expected(
            "r", info.layout, info.fingerprint, token_hash(tokens), count, layers=layers, split=info.split, chunks=True
        )
        arriving = ArrivingKV(expected.head, count, arenas=self.tickets.arenas, layers=layers, hidden=expected.hidden)
        ticket = self.tickets.issue(expected, lambda outcome: None, deadline=deadline, arriving=arriving).ticket
        answer = Collector()
        answer.timing.add_done_callback(lambda timing: arriving.release())
        self.tail.submit(DecodeRequest("r", tokens, SAMPLING, arriving=arriving), answer)
        header = Header(
            ticket, "r", info.fingerprint, expected.head, expected.token_hash, count,
            chunks=True, layers=layers, hidden=expected.hidden,
        )  # fmt: skip
        transfer = Transfer("127.0.0.1", self.server.port, header, deadline=deadline)
        run = self.head.start(tokens[:-1], transfer.send, layers=layers)
        while not run.done and (chunks is None or count - run.remaining < 64 * chunks):
            run.step()
        if chunks is not None:  # what has been sent before it is cut off
            wait_until(lambda: arriving.whole == 64 * chunks)
        if run.done:
            transfer.finish()
        else:
            transfer.abort()
        run.close()
        return answer


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    source = write_config(tmp_path)
    head = SimulatedPrefillEngine(source, 4096, OPTIONS, "h200-sxm")
    with closing(SimulatedDecodeEngine(source, 4096, OPTIONS, "h200-sxm")) as tail:
        tickets = Tickets(Arenas(tail.allocate))
        with closing(KVServer("127.0.0.1", 0, tickets)) as server:
            yield Pair(head, tail, tickets, server)


@pytest.mark.parametrize("layers", [1, 4, 7, 8])
def test_a_prompt_that_both_compute_is_answered_as_by_one_alone(pair: Pair, layers: int) -> None:
    tokens = list(range(300))
    answer = pair.submit(tokens, layers)
    timing = answer.timing.result(PATIENCE_S)
    assert answer.tokens == [token.id for token in pair.head.generate(tokens, SAMPLING)]
    assert (timing.computed_prompt_tokens, timing.resumed_at) == (1, None)
    assert (timing.tail_compute_s > 0) == (layers < LAYERS)
    wait_until(lambda: (pair.tail.running, pair.tail.kv_bytes) == (0, 0))


def test_the_tail_takes_no_less_than_predicted(pair: Pair) -> None:
    timing = pair.submit(list(range(600)), 4).timing.result(PATIENCE_S)
    model = pair.tail._model
    machines = model.shape, model.device, model.device, Link(10.0)
    assert timing.tail_compute_s >= 0.99 * split(SplitPair(*machines, "bfloat16", 64), 599, 4).tail_s


@pytest.mark.parametrize("layers", [4, 8])
def test_a_head_that_is_cut_off_is_gone_on_from_after_its_last_whole_chunk(pair: Pair, layers: int) -> None:
    tokens = list(range(300))
    answer = pair.submit(tokens, layers, chunks=2)
    timing = answer.timing.result(PATIENCE_S)
    assert timing.resumed_at == 128
    assert timing.computed_prompt_tokens == 300 - 128
    assert answer.tokens == [token.id for token in pair.head.generate(tokens, SAMPLING)]
    wait_until(lambda: (pair.tail.running, pair.tail.kv_bytes) == (0, 0))


def test_pieces_of_a_tail_leave_running_answers_their_time(pair: Pair) -> None:
    running = Collector()
    pair.tail.submit(DecodeRequest("running", [1, 2], Sampling(max_tokens=2000, ignore_eos=True)), running)
    wait_until(lambda: len(running.tokens) > 10)
    began, before = time.monotonic(), len(running.tokens)
    timing = pair.submit(list(range(1000)), 1).timing.result(PATIENCE_S)
    assert time.monotonic() - began >= 4 * timing.tail_compute_s
    assert len(running.tokens) > before
    pair.tail.cancel("running")
