"""A transfer in chunks between both ends, over real connections."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from disagg.api.layout import Layout
from disagg.api.names import INT8
from disagg.errors import Cancelled, DisaggError, PeerLost, ProtocolError
from disagg.kv.arriving import CREDIT_CHUNKS, Chunk
from disagg.kv.parts import Part
from disagg.kv.receive.chunks import AHEAD
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from tests.deadlines import wait_until
from tests.kv.chunk_parts import HEAD, LAYOUT, SPLIT, Awaited, Prompt
from tests.kv.kv_parts import PATIENCE_S, Cache, Receiver, groups_layout, mixed_layout, parts_of, stream

ALL = None  # layers of a whole hand-off
STATELESS = Layout(tuple(layer for layer in LAYOUT.layers if layer.kind != "state"), LAYOUT.dtype)


@contextlib.contextmanager
def sending(receiver: Receiver, awaited: Awaited, **changes: object) -> Iterator[Transfer]:
    header = awaited.prompt.header(awaited.slot, **changes)
    deadline = time.monotonic() + PATIENCE_S
    with Transfer("127.0.0.1", receiver.server.port, header, deadline=deadline) as transfer:
        yield transfer


def takes(awaited: Awaited) -> None:
    """Take the next chunk when it has come."""
    wait_until(awaited.take_all)


@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("layers", [HEAD, SPLIT.layers, ALL])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunks_are_there_as_they_come_and_make_up_the_kv(
    receiver: Receiver, chunk: int, layers: int | None, start: int
) -> None:
    prompt = Prompt.random(23, start, layers)
    awaited = Awaited.by(receiver.tickets, prompt)
    chunks: list[Chunk] = []
    awaited.arriving.watch(lambda: chunks.extend(awaited.take_all()))
    with sending(receiver, awaited) as transfer:
        for block in prompt.blocks(chunk):
            transfer.send(block)
        result = transfer.finish()
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and kv is awaited.arriving.kv is awaited.arriving.partial()
    wait_until(lambda: awaited.arriving.outcome == "complete")
    assert prompt.matches(kv) and awaited.arriving.whole == 23
    assert [one.start for one in chunks] == list(range(start, 23, chunk)) and chunks[-1].end == 23
    assert result.payload_bytes >= prompt.head.nbytes(23, start)
    awaited.arriving.release(reuse=True)
    wait_until(lambda: not awaited.memory.in_use)


def test_quantised_rows_come_in_chunks_too(receiver: Receiver) -> None:
    prompt = Prompt.random(30, layers=5, layout=groups_layout("float32"), wire=INT8)
    awaited = Awaited.by(receiver.tickets, prompt)
    awaited.arriving.watch(awaited.take_all)
    with sending(receiver, awaited) as transfer:
        for block in prompt.blocks(4):
            transfer.send(block)
        transfer.finish()
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
    awaited.arriving.release()


def test_a_sender_ahead_of_the_engine_waits_for_credit(receiver: Receiver) -> None:
    prompt = Prompt.random(40)
    awaited = Awaited.by(receiver.tickets, prompt)
    with sending(receiver, awaited) as transfer:
        for begin in range(0, 40, 4):
            for block in prompt.chunk(begin, begin + 4):
                transfer.send(block)
            assert transfer.starved == (begin // 4 + 1 >= CREDIT_CHUNKS)
        wait_until(lambda: awaited.arriving.whole == 4 * CREDIT_CHUNKS)
        assert transfer.queued_bytes > 0
        first = awaited.arriving.take()
        assert first is not None
        awaited.arriving.taken(first)
        wait_until(lambda: awaited.arriving.whole == 4 * (CREDIT_CHUNKS + 1))
        awaited.arriving.watch(awaited.take_all)
        wait_until(lambda: not transfer.starved)
        transfer.finish()
    awaited.arriving.release()


def test_states_and_the_end_need_no_credit(receiver: Receiver) -> None:
    """All chunks that may be sent without an engine have come: the transfer ends before the engine has begun."""
    prompt = Prompt.random(4 * CREDIT_CHUNKS, layers=6)
    assert any(prompt.states)
    awaited = Awaited.by(receiver.tickets, prompt)
    with sending(receiver, awaited) as transfer:
        for block in prompt.blocks(4):
            transfer.send(block)
        transfer.finish()
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
    assert len(awaited.take_all()) == CREDIT_CHUNKS
    awaited.arriving.release()


def test_a_transfer_without_hidden_states_is_never_starved(receiver: Receiver) -> None:
    prompt = Prompt.random(40, layers=ALL)
    awaited = Awaited.by(receiver.tickets, prompt)
    with sending(receiver, awaited) as transfer:
        for block in prompt.blocks(1):
            transfer.send(block)
            assert not transfer.starved
        transfer.finish()
    assert isinstance(awaited.outcome(), ReceivedKV)
    awaited.arriving.release()


def sent_chunks(transfer: Transfer, awaited: Awaited, begin: int, end: int, chunk: int = 4) -> None:
    """Chunks from `begin` to `end`, each taken once it has come."""
    for first in range(begin, end, chunk):
        for block in awaited.prompt.chunk(first, min(first + chunk, end)):
            transfer.send(block)
        takes(awaited)


@pytest.mark.parametrize("layers", [2, HEAD, SPLIT.layers])
@pytest.mark.parametrize("whole", [4, 16, 36])
def test_what_came_whole_before_a_sender_failed_can_be_gone_on_from(
    receiver: Receiver, whole: int, layers: int
) -> None:
    prompt = Prompt.random(37, 0, layers, layout=STATELESS)
    awaited = Awaited.by(receiver.tickets, prompt)
    with sending(receiver, awaited) as transfer:
        sent_chunks(transfer, awaited, 0, whole)
        transfer.send(next(prompt.chunk(whole, whole + 1)))
        wait_until(lambda: transfer.queued_bytes == 0)
    assert isinstance(awaited.outcome(), PeerLost)
    wait_until(lambda: isinstance(awaited.arriving.outcome, PeerLost))
    partial = awaited.arriving.partial()
    assert partial is not None and (partial.start, partial.tokens) == (0, whole)
    assert prompt.matches(partial)
    awaited.arriving.release(reuse=True)
    wait_until(lambda: not awaited.memory.in_use)


def test_with_a_state_in_the_head_or_before_the_first_chunk_there_is_nothing_to_go_on_from(receiver: Receiver) -> None:
    for layers, whole in ((6, 8), (HEAD, 0)):
        awaited = Awaited.by(receiver.tickets, Prompt.random(12, 0, layers))
        with sending(receiver, awaited) as transfer:
            sent_chunks(transfer, awaited, 0, whole)
            wait_until(lambda: awaited.memory.in_use)  # noqa: B023 - of this round
        assert isinstance(awaited.outcome(), DisaggError)
        assert awaited.arriving.partial() is None
        awaited.arriving.release()


def test_another_sender_goes_on_from_the_last_whole_chunk(receiver: Receiver) -> None:
    prompt = Prompt.random(37)
    awaited = Awaited.by(receiver.tickets, prompt, on_failure=Awaited.again)
    for begin, end in ((0, 8), (8, 20)):
        with sending(receiver, awaited) as transfer:
            sent_chunks(transfer, awaited, begin, end)
            transfer.send(next(prompt.chunk(end, end + 4)))
            wait_until(lambda: transfer.queued_bytes == 0)
        assert isinstance(awaited.outcome(), PeerLost)
        assert awaited.arriving.outcome is None and awaited.slot.expected.start == end
    with sending(receiver, awaited) as transfer:
        sent_chunks(transfer, awaited, 20, 37)
        result = transfer.finish()
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
    assert result.payload_bytes < prompt.head.nbytes(37) + 37 * prompt.split.hidden * 4
    awaited.arriving.release()


def test_a_transfer_that_is_given_up_at_its_last_byte_does_not_end_the_one_after_it(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt.random(20)
    awaited = Awaited.by(receiver.tickets, prompt, on_failure=Awaited.again)
    settle, lost = receiver.tickets.settle, PeerLost("too slow")

    def given_up_before(issued: IssuedTicket, outcome: KVOutcome) -> bool:
        if isinstance(outcome, ReceivedKV):
            settle(issued, lost)
            monkeypatch.setattr(receiver.tickets, "settle", settle)
        return settle(issued, outcome)

    monkeypatch.setattr(receiver.tickets, "settle", given_up_before)
    with sending(receiver, awaited) as first, contextlib.suppress(DisaggError):
        sent_chunks(first, awaited, 0, 20)
        first.finish()
    assert awaited.outcome() is lost
    with sending(receiver, awaited) as second:
        for block in prompt.blocks(4, awaited.arriving.whole):
            second.send(block)
        second.finish()
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
    awaited.arriving.release()


def test_what_a_failed_sender_still_sends_is_ignored(receiver: Receiver) -> None:
    prompt = Prompt.random(20)
    awaited = Awaited.by(receiver.tickets, prompt)
    with sending(receiver, awaited) as first:
        sent_chunks(first, awaited, 0, 8)
        awaited.again()
        with contextlib.suppress(DisaggError):
            for block in prompt.blocks(4, 8):
                first.send(block)
            first.finish()
        assert isinstance(awaited.outcome(), Cancelled)
        assert awaited.arriving.whole == 8 and awaited.arriving.outcome is None
    with sending(receiver, awaited) as second:
        sent_chunks(second, awaited, 8, 20)
        second.finish()
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
    awaited.arriving.release()


def test_a_prompt_that_finds_no_other_sender_ends_with_the_error_that_its_host_gives(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, Prompt.random(20))
    awaited.arriving.reopen()
    lost = PeerLost("no other prefill host has these layers")
    awaited.arriving.fail(lost)
    assert awaited.arriving.outcome is lost
    awaited.arriving.release()


def test_the_end_of_the_request_ends_the_transfer_and_the_memory(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, Prompt.random(20))
    with sending(receiver, awaited) as transfer:
        sent_chunks(transfer, awaited, 0, 8)
        awaited.arriving.release(reuse=True)
        awaited.arriving.release()
        wait_until(lambda: isinstance(transfer.failed, Cancelled))
    assert isinstance(awaited.outcome(), Cancelled)
    wait_until(lambda: not awaited.memory.in_use)
    assert awaited.arriving.take() is None and awaited.arriving.partial() is None


def test_a_ticket_for_chunks_takes_whole_kv_of_an_older_sender(receiver: Receiver) -> None:
    cache = Cache.random(mixed_layout("float32"), 12)
    prompt = Prompt.random(12, layers=ALL)
    awaited = Awaited.by(receiver.tickets, prompt)
    raw = stream(prompt.header(awaited.slot, chunks=False), parts_of(cache))
    assert [reply["ok"] for reply in receiver.exchange(raw, awaited.slot.ticket)] == [True, True]
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and cache.matches(kv)
    wait_until(lambda: awaited.arriving.outcome == "complete")
    assert awaited.arriving.whole == 12 and awaited.arriving.kv is kv
    awaited.arriving.release()


RANKS = [Part(heads=(0, 2), states=True, hidden=False), Part(heads=(2, 4), states=False)]


def test_a_chunk_has_come_once_every_part_of_it_has(receiver: Receiver) -> None:
    prompt = Prompt.random(20)
    awaited = Awaited.by(receiver.tickets, prompt)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(sending(receiver, awaited, part=part, parts=2)) for part in RANKS]
        for begin in range(0, 20, 5):
            for rank, part in zip(ranks, RANKS, strict=True):
                assert awaited.arriving.whole == begin
                for block in prompt.chunk(begin, begin + 5, part):
                    rank.send(block)
            takes(awaited)
        finishing = [threading.Thread(target=rank.finish) for rank in ranks]
        for thread in finishing:
            thread.start()
        for thread in finishing:
            thread.join(PATIENCE_S)
    kv = awaited.outcome()
    assert isinstance(kv, ReceivedKV) and prompt.matches(kv)
    awaited.arriving.release()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part(heads=(0, 2)), Part(heads=(2, 4), states=False)], "two parts carry the hidden states"),
        ([Part(heads=(0, 2), hidden=False), Part(heads=(2, 4), states=False, hidden=False)], "no part carries"),
    ],
)
def test_the_hidden_states_are_in_one_part(receiver: Receiver, parts: list[Part], message: str) -> None:
    awaited = Awaited.by(receiver.tickets, Prompt.random(20))
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(sending(receiver, awaited, part=part, parts=2))
        error = awaited.outcome()
    assert isinstance(error, ProtocolError) and message in error.message
    awaited.arriving.release()


def test_a_part_that_is_far_ahead_of_another_is_refused(receiver: Receiver) -> None:
    prompt = Prompt.random(AHEAD + 1)
    awaited = Awaited.by(receiver.tickets, prompt)
    with sending(receiver, awaited, part=RANKS[0], parts=2) as rank:
        with contextlib.suppress(DisaggError):
            for block in prompt.blocks(1, part=RANKS[0]):
                rank.send(block)
        error = awaited.outcome()
    assert isinstance(error, ProtocolError) and "64 chunks ahead of another" in error.message
    awaited.arriving.release()


def test_parts_have_the_same_chunks(receiver: Receiver) -> None:
    prompt = Prompt.random(20)
    awaited = Awaited.by(receiver.tickets, prompt)
    with contextlib.ExitStack() as stack:
        for part, chunk in zip(RANKS, (5, 4), strict=True):
            rank = stack.enter_context(sending(receiver, awaited, part=part, parts=2))
            with contextlib.suppress(DisaggError):
                for block in prompt.blocks(chunk, part=part):
                    rank.send(block)
        error = awaited.outcome()
    assert isinstance(error, ProtocolError) and "chunk 0 has tokens" in error.message
    awaited.arriving.release()
