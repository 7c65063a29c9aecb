"""disagg/servers/host/admission.py: who runs, who waits, who is refused."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

import pytest

from disagg.api.requests import Share
from disagg.errors import Overloaded
from disagg.servers.host.admission import Admission, Turns, retry_after

A, B = Share("a"), Share("b")


async def admit(admission: Admission, stack: ExitStack, share: Share = A) -> None:
    admission.take_place(share, stack)
    await admission.take_turn(share, stack)


async def test_one_runs_one_waits_and_the_third_is_refused() -> None:
    admission, first, second = Admission(1, 1), ExitStack(), ExitStack()
    await admit(admission, first)
    waiting = asyncio.ensure_future(admit(admission, second))
    await asyncio.sleep(0)
    assert (admission.running, admission.queued, waiting.done()) == (1, 1, False)
    with pytest.raises(Overloaded, match="1 running, 1 waiting"):
        admission.take_place(A, ExitStack())
    first.close()
    await waiting
    assert (admission.running, admission.queued) == (1, 0)
    second.close()
    assert (admission.running, admission.queued) == (0, 0)


async def test_turns_are_given_in_the_order_of_arrival() -> None:
    admission, running, order = Admission(1, 3), ExitStack(), list[int]()
    await admit(admission, running)

    async def wait(number: int) -> None:
        with ExitStack() as stack:
            await admit(admission, stack)
            order.append(number)

    tasks = [asyncio.ensure_future(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    running.close()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_a_cancelled_wait_releases_its_place_and_takes_no_turn() -> None:
    admission, running, waiting = Admission(1, 1), ExitStack(), ExitStack()
    await admit(admission, running)
    task = asyncio.ensure_future(admit(admission, waiting))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    waiting.close()
    assert (admission.running, admission.queued) == (1, 0)
    running.close()
    with ExitStack() as stack:
        await admit(admission, stack)
        assert admission.running == 1


async def test_the_next_turn_is_that_of_the_key_that_has_fewest() -> None:
    admission, order = Admission(2, 6), list[str]()
    running = [ExitStack(), ExitStack()]
    for stack in running:
        await admit(admission, stack)

    async def wait(share: Share) -> None:
        with ExitStack() as stack:
            await admit(admission, stack, share)
            order.append(share.key)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(wait(share)) for share in (A, A, A, B)]
    await asyncio.sleep(0)
    running[0].close()
    async with asyncio.timeout(30):
        await tasks[3]
    assert order == ["b"], "one of two turns is kept free for it"
    running[1].close()
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)
    assert order == ["b", "a", "a", "a"] and admission.running == 0


async def test_turns_that_are_kept_free_for_a_key_are_given_once_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, gone = Turns(2, look_again_s=0.01), ExitStack()
    monkeypatch.setattr("disagg.shares.PRESENT_S", 0.1)
    await turns.take(B, gone)
    gone.close()
    with ExitStack() as stack:
        await turns.take(A, stack)
        second = asyncio.ensure_future(turns.take(A, stack))
        await asyncio.sleep(0)
        assert turns.taken == 1 and not second.done(), "the other one is kept free"
        async with asyncio.timeout(30):
            await second
        assert turns.taken == 2


async def test_in_a_full_queue_the_youngest_that_waits_yields_its_place_to_a_key_that_has_none() -> None:
    admission, stacks, yielded = Admission(1, 3), [ExitStack() for _ in range(4)], list[int]()
    for number, stack in enumerate(stacks):
        admission.take_place(A, stack, lambda at=number: at != 3, partial(yielded.append, number))  # type: ignore[misc]
    with pytest.raises(Overloaded, match="the server's queue is full"):
        admission.take_place(A, ExitStack())
    other = ExitStack()
    admission.take_place(B, other)
    assert yielded == [2] and admission.queued == 4, "the last one has begun"
    stacks[2].close()
    assert admission.queued == 4, "it has no place to give back"
    other.close()
    with pytest.raises(Overloaded, match="0 running, 3 waiting, and 1 of its places is kept free for other keys"):
        admission.take_place(A, ExitStack())


@pytest.mark.parametrize(("wait_s", "seconds"), [(0, 1), (0.9, 1), (2.001, 3), (1_000, 30)])
def test_a_refused_caller_is_asked_to_wait_until_it_may_expect_a_place(wait_s: float, seconds: int) -> None:
    assert retry_after(wait_s) == seconds
