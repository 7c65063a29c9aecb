"""One transfer on several connections: together the parts are the layout exactly once, or the transfer fails."""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.api.names import INT8
from disagg.errors import DisaggError, ProtocolError, TicketRefused
from disagg.kv.blocks import KVBlock, StateBlock
from disagg.kv.outbox import frames_of
from disagg.kv.parts import WHOLE, Coverage, Part
from disagg.kv.receive.tickets import IssuedTicket
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from tests.deadlines import wait_until
from tests.kv.kv_parts import (
    PATIENCE_S,
    Cache,
    Receiver,
    groups_layout,
    header_for,
    introduce,
    mixed_layout,
    opened,
    parts_of,
    read_replies,
    start_receiver,
    stream,
)

LAYOUT = mixed_layout()  # 3 heads; 2 heads; a state; 1 head
RANKS = (Part(heads=(0, 1)), Part(heads=(1, 2), states=False), Part(heads=(2, 4), states=False))
STAGES = (Part(layers=(0, 3)), Part(layers=(1, 2)))
GRID = (
    Part((0, 1), (0, 1)),
    Part((0, 1), (1, 9), states=False),
    Part((2,)),
    Part((3,), states=False),
)
SPLITS = [(WHOLE,), RANKS, STAGES, GRID]


def ship_part(receiver: Receiver, slot: IssuedTicket, cache: Cache, part: Part, parts: int, chunk: int) -> None:
    header = header_for(slot, part=part, parts=parts)
    with Transfer("127.0.0.1", receiver.server.port, header, deadline=time.monotonic() + PATIENCE_S) as transfer:
        for block in cache.blocks(chunk, part):
            transfer.send(block)
        transfer.finish()


def ship(receiver: Receiver, slot: IssuedTicket, cache: Cache, parts: Sequence[Part]) -> None:
    """Every part on a thread of its own, each in chunks of its own."""
    threads = [
        threading.Thread(target=ship_part, args=(receiver, slot, cache, part, len(parts), 2 + i))
        for i, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("start", [0, 3, 12, 19, 20])
def test_the_parts_of_a_cache_arrive_as_the_whole_from_any_start(
    receiver: Receiver, parts: Sequence[Part], start: int
) -> None:
    cache = Cache.random(LAYOUT, 20, start)
    slot = receiver.issue(cache)
    ship(receiver, slot, cache, parts)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and cache.matches(kv) and kv.start == start
    assert receiver.held_bytes == kv.nbytes == cache.layout.nbytes(20, start)
    kv.release()
    receiver.require_serving()


def test_parts_of_quantised_kv_arrive_as_the_whole(receiver: Receiver) -> None:
    cache = Cache.random(groups_layout(), 23, 5, wire=INT8)
    slot = receiver.issue(cache)
    ship(receiver, slot, cache, (Part(heads=(0, 1)), Part(heads=(1, 2), states=False)))
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and cache.matches(kv)
    kv.release()


def test_the_times_of_all_parts_are_the_transfers_times(receiver: Receiver) -> None:
    cache = Cache.random(LAYOUT, 20)
    slot = receiver.issue(cache)
    before = time.monotonic()
    for part in STAGES:  # one after the other
        raw = stream(header_for(slot, part=part, parts=2), parts_of(cache, part=part))
        (accepted, acknowledged) = receiver.exchange(raw, slot.ticket)
        assert accepted["ok"] and acknowledged["ok"]
        assert acknowledged["received_bytes"] < cache.layout.nbytes(20)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    assert before <= kv.timing.claimed <= kv.timing.first_byte < kv.timing.last_byte <= kv.timing.accepted
    kv.release()


@pytest.mark.parametrize("parts", SPLITS)
def test_parts_that_are_the_layout_exactly_once_are_complete(parts: Sequence[Part]) -> None:
    coverage = Coverage(LAYOUT)
    for part in parts[:-1]:
        coverage.add(part)
        with pytest.raises(ProtocolError, match="no part carries"):
            coverage.require_complete()
    coverage.add(parts[-1])
    coverage.require_complete()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (WHOLE, WHOLE, r"two parts carry KV heads \[0, 3\) of layer 0"),
        (Part(heads=(0, 2)), Part(heads=(1, 3), states=False), r"KV heads \[1, 3\) of layer 0"),
        (Part(layers=(0, 1)), Part(layers=(1, 2)), "of layer 1"),
        (Part(heads=(0, 1)), Part(heads=(1, 3)), "two parts carry the states of layer 2"),
        (Part(layers=(4,)), WHOLE, "a part carries layer 4 of a model with 4 layers"),
    ],
)
def test_what_two_parts_carry_is_refused(first: Part, second: Part, message: str) -> None:
    coverage = Coverage(LAYOUT)
    with pytest.raises(ProtocolError, match=message):
        for part in (first, second):
            coverage.add(part)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(heads=(0, 2)), "no part carries KV head 2 of layer 0"),
        (Part(heads=(1, 3)), "no part carries KV head 0 of layer 0"),
        (Part(layers=(0, 1, 2)), "no part carries KV head 0 of layer 3"),
        (Part(states=False), "no part carries the states of layer 2"),
    ],
)
def test_what_no_part_carries_is_named(part: Part, message: str) -> None:
    coverage = Coverage(LAYOUT)
    coverage.add(part)
    with pytest.raises(ProtocolError, match=message):
        coverage.require_complete()


@pytest.mark.parametrize(
    ("second", "parts", "message"),
    [
        (Part(heads=(0, 1), states=False), 2, "two parts carry"),
        (Part(heads=(1, 2), states=False), 2, "no part carries KV head 2 of layer 0"),
        (Part(heads=(1, 3), states=False), 3, "one part states 2 parts"),
    ],
)
def test_a_part_that_does_not_fit_fails_the_slot_and_ends_the_others(
    receiver: Receiver, second: Part, parts: int, message: str
) -> None:
    cache = Cache.random(LAYOUT, 9)
    slot = receiver.issue(cache)
    with receiver.dial() as other:
        introduce(other, slot.ticket, opened(header_for(slot, part=Part(heads=(0, 1)), parts=2)))
        wait_until(lambda: receiver.held_bytes > 0)
        (refused,) = receiver.exchange(opened(header_for(slot, part=second, parts=parts)), slot.ticket)
        error = receiver.result(slot)
        assert isinstance(error, ProtocolError) and message in error.message
        assert refused["error"]["message"] == error.message
        assert read_replies(other)[-1]["error"]["message"] == error.message
    receiver.require_serving()


def test_a_part_that_is_lost_fails_the_slot_and_ends_the_others(receiver: Receiver) -> None:
    cache = Cache.random(LAYOUT, 9)
    slot = receiver.issue(cache)
    raw = [stream(header_for(slot, part=part, parts=3), parts_of(cache, part=part)) for part in RANKS]
    whole = receiver.exchange(raw[0], slot.ticket)
    assert [reply["ok"] for reply in whole] == [True, True]
    with receiver.dial() as waits, receiver.dial() as dies:
        introduce(waits, slot.ticket, raw[1][:-10])
        introduce(dies, slot.ticket, raw[2][:-10])
        wait_until(lambda: slot.incoming.full)
        dies.shutdown(socket.SHUT_WR)
        assert isinstance(receiver.result(slot), DisaggError)
        assert read_replies(waits)[-1]["error"]["code"] == "PeerLost"
    receiver.require_serving()


def test_one_connection_more_than_parts_is_refused_and_harms_none(receiver: Receiver) -> None:
    cache = Cache.random(LAYOUT, 9)
    slot = receiver.issue(cache)
    raw = [stream(header_for(slot, part=part, parts=2), parts_of(cache, part=part)) for part in STAGES]
    with ExitStack() as stack:
        socks = [stack.enter_context(receiver.dial()) for _ in raw]
        for sock, one in zip(socks, raw, strict=True):
            introduce(sock, slot.ticket, one[:-10])
        wait_until(lambda: slot.incoming.full)
        (refused,) = receiver.exchange(raw[0], slot.ticket)
        assert refused["error"]["code"] == "TicketRefused"
        for sock, one in zip(socks, raw, strict=True):
            sock.sendall(one[-10:])
            assert [reply["ok"] for reply in read_replies(sock)] == [True, True]
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and cache.matches(kv)
    kv.release()
    receiver.require_serving()


def test_two_that_join_as_the_last_part_at_once_leave_one_refused(receiver: Receiver) -> None:
    cache = Cache.random(LAYOUT, 9)
    slot = receiver.issue(cache)
    slot.incoming.join(header_for(slot))
    with pytest.raises(TicketRefused):
        slot.incoming.join(header_for(slot))
    slot.incoming.leave()
    receiver.tickets.revoke(slot.ticket)
    receiver.require_serving()


def test_bytes_stay_reserved_until_the_last_connection_has_left_the_memory() -> None:
    receiver = start_receiver()
    cache = Cache.random(LAYOUT, 9)
    slot = receiver.issue(cache)
    for part in RANKS[:2]:
        slot.incoming.join(header_for(slot, part=part, parts=3))
    nbytes = cache.layout.nbytes(9)
    assert receiver.held_bytes == nbytes
    receiver.tickets.revoke(slot.ticket)
    slot.incoming.leave()
    assert receiver.held_bytes == nbytes
    slot.incoming.leave()
    assert receiver.held_bytes == 0
    receiver.server.close()


@pytest.mark.parametrize(
    "block",
    [
        KVBlock(0, 0, 1, [memoryview(bytes(16))] * 3, [memoryview(bytes(8))] * 3),  # all heads, the part has two
        KVBlock(1, 0, 1, [memoryview(bytes(8))] * 2, [memoryview(bytes(8))] * 2),  # a layer of another part
        StateBlock(2, [memoryview(bytes(120)), memoryview(bytes(8))]),
    ],
)
def test_a_block_of_another_part_is_refused_where_it_was_made(block: KVBlock | StateBlock) -> None:
    part = Part((0, 2), (1, 3), states=False)
    with pytest.raises(ProtocolError):
        frames_of(block, LAYOUT, part=part)


def test_a_frame_of_another_part_is_refused_by_the_receiver(receiver: Receiver) -> None:
    cache = Cache.random(
        Layout((LayerLayout("full", 2, 4, 4), LayerLayout("state", states=(StateTensor((2,)),))), "float32"), 5
    )
    for part, other in ((Part((0,)), Part((1,))), (Part((1,)), Part((0,)))):
        slot = receiver.issue(cache)
        raw = stream(header_for(slot, part=part, parts=2), parts_of(cache, part=other))
        receiver.exchange(raw, slot.ticket)
        error = receiver.result(slot)
        assert isinstance(error, ProtocolError) and "not" in error.message
    receiver.require_serving()
