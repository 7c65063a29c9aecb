"""disagg/servers/admission.py: who runs, who waits, who is refused."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from disagg.errors import Overloaded
from disagg.servers.admission import Admission, retry_after


async def admit(admission: Admission, stack: ExitStack) -> None:
    admission.take_place(stack)
    await admission.take_turn(stack)


async def test_one_runs_one_waits_and_the_third_is_refused() -> None:
    admission, first, second = Admission(1, 1), ExitStack(), ExitStack()
    await admit(admission, first)
    waiting = asyncio.ensure_future(admit(admission, second))
    await asyncio.sleep(0)
    assert (admission.running, admission.queued, waiting.done()) == (1, 1, False)
    with pytest.raises(Overloaded, match="1 running, 1 waiting"):
        admission.take_place(ExitStack())
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


@pytest.mark.parametrize(("wait_s", "seconds"), [(0, 1), (0.9, 1), (2.001, 3), (1_000, 30)])
def test_a_refused_caller_is_asked_to_wait_until_it_may_expect_a_place(wait_s: float, seconds: int) -> None:
    assert retry_after(wait_s) == seconds
