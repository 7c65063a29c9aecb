"""Both real ends together: what is sent is what arrives, for every kind of layer, dtype and chunking."""

import contextlib
import multiprocessing
import random
import threading
import time
from multiprocessing.connection import Connection

import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import INT8
from disagg.errors import Cancelled, PeerLost, TicketRefused
from disagg.kv.frames import Header
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from tests.deadlines import wait_until
from tests.kv.kv_parts import PATIENCE_S, WINDOW, Cache, Receiver, groups_layout, header_for, mixed_layout


def ship(port: int, header: Header, cache: Cache, chunk: int) -> None:
    with Transfer.open("127.0.0.1", port, header, deadline=time.monotonic() + PATIENCE_S) as transfer:
        for block in cache.blocks(chunk):
            transfer.send(block)
        result = transfer.finish()
    assert result.payload_bytes == cache.layout.nbytes(cache.tokens, cache.start, cache.wire)


def arrives(receiver: Receiver, cache: Cache, chunk: int) -> bool:
    slot = receiver.issue(cache)
    ship(receiver.server.port, header_for(slot), cache, chunk)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and kv.wire == cache.wire
    assert receiver.held_bytes == kv.nbytes
    same = cache.matches(kv) and (kv.tokens, kv.start) == (cache.tokens, cache.start)
    kv.release()
    return same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_every_dtype_arrives_whole_with_ragged_chunks(receiver: Receiver, dtype: str, chunk: int) -> None:
    assert arrives(receiver, Cache.random(mixed_layout(dtype), 23), chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_quantised_kv_arrives_whole_with_ragged_chunks(receiver: Receiver, dtype: str, chunk: int) -> None:
    assert arrives(receiver, Cache.random(groups_layout(dtype), 23, wire=INT8), chunk)


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_prompts_around_the_window_arrive_whole(receiver: Receiver, tokens: int) -> None:
    assert arrives(receiver, Cache.random(mixed_layout(), tokens), 4)


def test_a_one_token_prompt_ships_nothing_and_is_acknowledged(receiver: Receiver) -> None:
    assert arrives(receiver, Cache.random(mixed_layout(), 0), 4)


@pytest.mark.parametrize("start", [1, 9, 16, 17])
def test_only_the_rows_that_the_decode_host_lacks_are_shipped(receiver: Receiver, start: int) -> None:
    assert arrives(receiver, Cache.random(mixed_layout(), 17, start), 4)


def test_blocks_larger_than_every_socket_buffer_arrive_whole(receiver: Receiver) -> None:
    layout = Layout((LayerLayout("full", 3, 1 << 16, 1 << 15), LayerLayout("full", 1, 8, 8)), "float32")
    assert arrives(receiver, Cache.random(layout, 17), 9)


def test_more_heads_than_one_system_call_takes_arrive_whole(receiver: Receiver) -> None:
    assert arrives(receiver, Cache.random(Layout((LayerLayout("full", 2500, 1, 1),), "float16"), 5), 2)


def test_many_transfers_at_once_do_not_mix(receiver: Receiver) -> None:
    caches = [Cache.random(mixed_layout(), random.Random(i).randrange(0, 60), seed=i) for i in range(24)]
    slots = [receiver.issue(cache, f"r{i}") for i, cache in enumerate(caches)]
    threads = [
        threading.Thread(target=ship, args=(receiver.server.port, header_for(slot), cache, 1 + i % 7))
        for i, (slot, cache) in enumerate(zip(slots, caches, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for slot, cache in zip(slots, caches, strict=True):
        kv = receiver.result(slot)
        assert isinstance(kv, ReceivedKV) and cache.matches(kv)
        kv.release()
    wait_until(receiver.settled)


def test_transfers_revoked_at_random_moments_leave_nothing_behind(receiver: Receiver) -> None:
    cache = Cache.random(mixed_layout(), 200)
    chance = random.Random(7)

    def attempt(header: Header) -> None:
        with contextlib.suppress(Cancelled, TicketRefused, PeerLost):  # by the moment; any other kind fails the test
            ship(receiver.server.port, header, cache, 8)

    for _ in range(40):
        slot = receiver.issue(cache)
        thread = threading.Thread(target=attempt, args=(header_for(slot),))
        thread.start()
        time.sleep(chance.uniform(0, 0.01))  # the random moment
        receiver.tickets.revoke(slot.ticket)
        result = receiver.result(slot)
        if isinstance(result, ReceivedKV):
            result.release()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    receiver.require_serving()


def ship_from_another_process(pipe: Connection) -> None:
    port, header = pipe.recv()
    ship(port, header, Cache.random(header.layout, header.tokens, header.start), 5)
    pipe.send("shipped")


def test_a_cache_crosses_between_processes(receiver: Receiver) -> None:
    cache = Cache.random(mixed_layout(), 33)
    slot = receiver.issue(cache)
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ship_from_another_process, args=(theirs,))
    process.start()
    mine.send((receiver.server.port, header_for(slot)))
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and cache.matches(kv)
    assert mine.poll(PATIENCE_S) and mine.recv() == "shipped"
    process.join(PATIENCE_S)
    kv.release()
