"""disagg/kv/arena.py, Reservation: memory that several use, and that is free when the last one has ended."""

from __future__ import annotations

import threading

import pytest

from disagg.errors import Cancelled
from disagg.kv.arena import Reservation

PATIENCE_S = 60.0


def test_memory_is_free_once_when_its_last_use_has_ended_in_any_order() -> None:
    freed = list[int]()
    memory = Reservation(100, freed.append)
    request, connection, engine = memory.use(), memory.use(), memory.use()
    request()
    request()  # has no effect
    engine()
    assert (freed, memory.in_use) == ([], True)
    connection()
    connection()
    assert (freed, memory.in_use) == ([100], False)


def test_memory_that_is_not_needed_any_more_is_free_before_the_rest() -> None:
    freed = list[int]()
    memory = Reservation(100, freed.append)
    end = memory.use()
    memory.reduce(120)
    assert freed == []
    memory.reduce(70)
    end()
    memory.reduce(0)
    assert freed == [30, 70]


def test_memory_that_is_free_cannot_be_used_again() -> None:
    memory = Reservation(100, lambda nbytes: None)
    memory.use()()
    with pytest.raises(Cancelled, match="has been released"):
        memory.use()


def test_memory_is_free_once_however_many_threads_end_their_use_at_the_same_time() -> None:
    freed = list[int]()
    memory = Reservation(7, freed.append)
    barrier = threading.Barrier(8)

    def end_together(end: object) -> None:
        barrier.wait(PATIENCE_S)
        assert callable(end)
        end()
        end()

    threads = [threading.Thread(target=end_together, args=(memory.use(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert freed == [7]
