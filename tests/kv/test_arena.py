import threading

import pytest

from disagg.errors import Overloaded
from disagg.kv.arena import Arena, Arenas, allocate_numpy, size_class

KEEP = 1 << 20


def test_a_transfer_reuses_the_memory_that_another_released() -> None:
    arenas = Arenas(keep_bytes=KEEP)
    first = arenas.acquire(1000)
    arenas.release(first)

    assert arenas.idle_bytes == first.data.nbytes
    assert arenas.acquire(990) is first
    assert arenas.idle_bytes == 0


def test_memory_in_use_is_never_acquired_twice() -> None:
    arenas = Arenas(keep_bytes=KEEP)
    assert arenas.acquire(1000) is not arenas.acquire(1000)


def test_of_several_the_smallest_that_fits_is_taken() -> None:
    arenas = Arenas(keep_bytes=KEEP)
    large, small = arenas.acquire(2000), arenas.acquire(1200)
    arenas.release(large)
    arenas.release(small)

    assert arenas.acquire(1100) is small


def test_a_small_transfer_does_not_sit_in_a_large_arena() -> None:
    arenas = Arenas(keep_bytes=KEEP)
    large = arenas.acquire(100_000)
    arenas.release(large)

    assert arenas.acquire(1000) is not large


@pytest.mark.parametrize("idle", range(1000, 3000, 100))
def test_no_transfer_holds_much_more_memory_than_the_budget_counts_for_it(idle: int) -> None:
    arenas = Arenas(keep_bytes=KEEP)
    arenas.release(arenas.acquire(idle))

    assert 1000 <= arenas.acquire(1000).data.nbytes <= 1410


def test_an_arena_too_large_to_be_kept_does_not_drive_out_the_others() -> None:
    arenas = Arenas(keep_bytes=2048)
    small, large = arenas.acquire(1024), arenas.acquire(4096)
    arenas.release(small)
    arenas.release(large)

    assert arenas.acquire(1024) is small


def test_idle_memory_is_freed_before_a_transfer_is_refused() -> None:
    room = [5000]

    class Memory(bytearray):
        """Its bytes are free again when nobody holds it."""

        def __del__(self) -> None:
            room[0] += len(self)

    def allocate(nbytes: int) -> Memory:
        if nbytes > room[0]:
            raise MemoryError("full")
        room[0] -= nbytes
        return Memory(nbytes)

    arenas = Arenas(allocate, keep_bytes=KEEP)
    arenas.release(arenas.acquire(2000))
    large = arenas.acquire(4000)
    assert large.data.nbytes >= 4000
    with pytest.raises(Overloaded):
        arenas.acquire(4000)


def test_idle_memory_is_bounded_and_the_oldest_goes_first() -> None:
    arenas = Arenas(keep_bytes=2048)
    first, second, third = (arenas.acquire(1024) for _ in range(3))
    for arena in (first, second, third):
        arenas.release(arena)

    assert arenas.idle_bytes == 2048
    assert {id(arenas.acquire(1024)), id(arenas.acquire(1024))} == {id(second), id(third)}


def test_idle_memory_lies_within_what_is_not_reserved() -> None:
    left = [4096]
    arenas = Arenas(keep_bytes=1024, left=lambda: left[0])
    first, second = arenas.acquire(512), arenas.acquire(512)
    arenas.release(first)
    arenas.release(second)
    assert arenas.idle_bytes == 1024
    left[0] = 596
    arenas.acquire(3500)
    assert arenas.idle_bytes == 512
    left[0] = 0
    arenas.release(first)
    assert arenas.idle_bytes == 0


def test_memory_that_is_reserved_for_something_else_does_not_lie_idle() -> None:
    left = [4096]
    arenas = Arenas(keep_bytes=1024, left=lambda: left[0])
    arenas.release(arenas.acquire(512))
    left[0] = 511
    arenas.trim()
    assert arenas.idle_bytes == 0


def test_without_keeping_nothing_lies_idle() -> None:
    arenas = Arenas()
    arenas.release(arenas.acquire(10))
    assert arenas.idle_bytes == 0


def test_missing_memory_is_overloaded_not_a_crash() -> None:
    with pytest.raises(Overloaded, match="no memory for"):
        Arenas().acquire(1 << 59)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 9, 1000, 1024, 1025, 805_306_368, 805_306_369])
def test_a_size_class_is_at_most_an_eighth_larger_than_requested(nbytes: int) -> None:
    assert nbytes <= size_class(nbytes) <= max(1, nbytes * 9 / 8)


def test_an_arena_shows_the_memory_itself() -> None:
    memory = allocate_numpy(16)
    Arena.over(memory).data[:] = 7
    assert memory.tolist() == [7] * 16


def test_many_threads_never_share_an_arena() -> None:
    arenas = Arenas(keep_bytes=KEEP)
    clashes: list[int] = []

    def work(name: int) -> None:
        for _ in range(200):
            arena = arenas.acquire(512)
            arena.data[:] = name
            if set(arena.data.tolist()) != {name}:
                clashes.append(name)
            arenas.release(arena)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []


def test_a_host_that_holds_more_than_its_limit_for_a_moment_keeps_no_idle_arena_and_still_receives() -> None:
    left = [KEEP]
    arenas = Arenas(keep_bytes=KEEP, left=lambda: left[0])
    idle = arenas.acquire(2000)
    arenas.release(idle)
    left[0] = -45

    arenas.trim()
    assert arenas.idle_bytes == 0
    received = arenas.acquire(1000)
    arenas.release(received)
    assert arenas.idle_bytes == 0
