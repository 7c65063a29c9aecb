"""disagg/servers/decode/memory.py: who gets KV memory, in which order, and what is given up for it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from disagg.api.requests import Share
from disagg.errors import KVMemoryExceeded
from disagg.kv.arena import Reservation
from disagg.servers.decode.memory import KVMemory


class Kept:
    """KV of finished requests, of which `in_use` bytes cannot be given up."""

    def __init__(self, nbytes: int = 0, in_use: int = 0) -> None:
        self.nbytes, self.in_use = nbytes, in_use

    def give_up(self, nbytes: int) -> None:
        self.nbytes -= min(nbytes, self.nbytes - self.in_use)


def memory(limit: int, kept: Kept | None = None) -> KVMemory:
    kept = kept or Kept()
    return KVMemory(limit, lambda: kept.nbytes, kept.give_up)


async def waiting(room: KVMemory, nbytes: int, cleanup: ExitStack) -> asyncio.Task[Reservation]:
    """A task that has asked for `nbytes`."""
    task = asyncio.ensure_future(room.reserve(nbytes, Share(), cleanup))
    await asyncio.sleep(0)
    return task


async def test_a_request_that_can_never_fit_is_refused_as_such_even_while_others_wait() -> None:
    room, first, second = memory(100), ExitStack(), ExitStack()
    await room.reserve(80, Share(), first)
    task = await waiting(room, 50, second)
    with pytest.raises(KVMemoryExceeded, match="need 101 bytes of KV, this host has 100"):
        await room.reserve(101, Share(), ExitStack())
    first.close()
    await task
    assert room.reserved == 50
    second.close()
    assert room.reserved == 0


async def test_a_small_request_does_not_overtake_a_large_one_that_waits() -> None:
    room, first, large, small = memory(100), ExitStack(), ExitStack(), ExitStack()
    await room.reserve(80, Share(), first)
    one, other = await waiting(room, 90, large), await waiting(room, 10, small)
    assert room.try_reserve(10, Share(), ExitStack()) is None
    assert not one.done() and not other.done()
    first.close()
    await asyncio.gather(one, other)
    assert room.reserved == 100


@pytest.mark.parametrize("granted", [False, True], ids=["before", "as"])
async def test_a_request_that_leaves_before_or_as_it_gets_room_holds_none(granted: bool) -> None:
    room, first, second = memory(100), ExitStack(), ExitStack()
    await room.reserve(80, Share(), first)
    task, next_one = await waiting(room, 90, ExitStack()), await waiting(room, 20, second)
    if granted:
        first.close()
        room.wake()
    task.cancel()
    await asyncio.wait((task,))
    await next_one
    first.close()
    second.close()
    assert task.cancelled() and room.reserved == 0


async def test_room_that_is_released_as_a_waiting_request_is_cancelled_goes_to_the_next_one() -> None:
    room, first, third = memory(100), ExitStack(), ExitStack()
    await room.reserve(80, Share(), first)
    cancelled, next_one = await waiting(room, 90, ExitStack()), await waiting(room, 30, third)
    cancelled.cancel()
    first.close()  # before the cancelled task has run
    await next_one
    await asyncio.wait((cancelled,))
    assert cancelled.cancelled() and room.reserved == 30
    third.close()
    assert room.reserved == 0


async def test_room_that_a_thread_frees_after_its_request_has_ended_goes_to_the_one_that_waits() -> None:
    room, first, second = memory(100), ExitStack(), ExitStack()
    engine = (await room.reserve(80, Share(), first)).use()
    task = await waiting(room, 30, second)
    first.close()
    room.wake()
    assert (room.reserved, task.done()) == (80, False)
    await asyncio.to_thread(engine)
    async with asyncio.timeout(60):
        await task
    assert room.reserved == 30


async def test_kept_kv_is_given_up_for_a_request_as_far_as_it_is_not_in_use() -> None:
    kept = Kept(90, in_use=30)
    room, first, second = memory(100, kept), ExitStack(), ExitStack()
    assert room.left == 10
    await room.reserve(20, Share(), first)
    assert (kept.nbytes, room.reserved, room.left) == (80, 20, 0)
    task = await waiting(room, 60, second)
    assert not task.done() and kept.nbytes == 30
    kept.in_use = 0
    room.wake()
    await task
    assert (kept.nbytes, room.left) == (20, 0)


async def test_each_reservation_is_reported_so_that_idle_memory_makes_room_for_it() -> None:
    left: list[int] = []
    room, first, second = (
        KVMemory(100, lambda: 0, lambda nbytes: None, lambda: left.append(room.left)),
        ExitStack(),
        ExitStack(),
    )
    await room.reserve(80, Share(), first)
    task = await waiting(room, 50, second)
    assert left == [20]
    first.close()
    await task
    assert left == [20, 50]
    second.close()


async def test_the_key_that_has_least_gets_the_next_room() -> None:
    room, first, kept = memory(100), ExitStack(), ExitStack()
    await room.reserve(60, Share("a"), first)
    await room.reserve(40, Share("a"), kept)
    stacks = [ExitStack() for _ in range(3)]
    asked = [("a", 60), ("a", 10), ("b", 50)]
    tasks = [
        asyncio.ensure_future(room.reserve(nbytes, Share(key), stack))
        for (key, nbytes), stack in zip(asked, stacks, strict=True)
    ]
    await asyncio.sleep(0)
    first.close()
    async with asyncio.timeout(30):
        await tasks[2]
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [False, False, True], "the first of the other key does not fit yet"
    for stack in (stacks[2], kept):
        stack.close()
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)
    for stack in stacks:
        stack.close()
    assert room.reserved == 0
