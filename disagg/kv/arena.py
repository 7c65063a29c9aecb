"""Memory to receive KV into: one arena per transfer, reused by later ones; and memory that is reserved for KV.

An arena is memory that the decode engine can compute from without a copy (a socket can fill an mlx array). Fresh memory
costs a page fault per page, for 800 MB more than the transfer itself; reused memory does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disagg.errors import Cancelled, Overloaded

__all__ = ["Allocate", "Arena", "Arenas", "Reservation", "allocate_numpy"]

CLASSES = 8  # sizes per doubling: a new arena is at most an eighth larger than requested
SLACK = 4  # a reused arena may be larger by another quarter: reservations count requested bytes

Buffer = Any  # numpy.ndarray of uint8, C-contiguous
# (bytes) -> an object with a writable, contiguous buffer of at least that size; callable from any thread.
# Raises MemoryError if there is not enough memory.
Allocate = Callable[[int], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """memory: the object that the engine allocated. data: its bytes, as a uint8 array."""

    memory: Any
    data: Buffer

    @classmethod
    def over(cls, memory: Any) -> Arena:
        """An arena over any object with a writable buffer."""
        import numpy

        return cls(memory, numpy.frombuffer(memory, numpy.uint8))


def allocate_numpy(nbytes: int) -> Buffer:
    """An Allocate for engines without memory of their own: a numpy array."""
    import numpy

    return numpy.empty(nbytes, numpy.uint8)


class Arenas:
    """A pool of arenas. Safe to use from any thread.

    keep_bytes: the most idle memory to keep; never more than `left()`, the bytes that are neither reserved nor held.
    An arena that is not released is freed with its last reference.
    No arena is more than 1.41 times as large as requested.
    """

    def __init__(
        self, allocate: Allocate = allocate_numpy, *, keep_bytes: int = 0, left: Callable[[], int] | None = None
    ) -> None:
        self._allocate = allocate
        self._keep_bytes = keep_bytes
        self._left = left or (lambda: keep_bytes)
        self._lock = threading.Lock()
        self._idle: list[Arena] = []  # in the order of their release

    @property
    def idle_bytes(self) -> int:
        """Bytes of released arenas that are kept for reuse."""
        with self._lock:
            return sum(arena.data.nbytes for arena in self._idle)

    def acquire(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`, with any contents. Overloaded if there is not enough memory."""
        size = size_class(nbytes)
        with self._lock:
            fitting = [arena for arena in self._idle if size <= arena.data.nbytes <= size + size // SLACK]
            if fitting:
                best = min(fitting, key=lambda arena: arena.data.nbytes)
                self._idle.remove(best)
                return best
            self._trim()
        try:
            return Arena.over(self._make(size))
        except MemoryError as error:
            raise Overloaded(f"no memory for {nbytes} bytes of KV: {error}") from error

    def release(self, arena: Arena) -> None:
        """Keep an arena that is no longer read for a later transfer; the oldest idle arenas are dropped to make room.
        An arena larger than `keep_bytes` is not kept."""
        if arena.data.nbytes > self._keep_bytes:
            return
        with self._lock:
            self._idle.append(arena)
            self._trim()

    def trim(self) -> None:
        """Drop idle arenas for which there is no room any more: more bytes are reserved."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        """Drop the oldest idle arenas until the rest fits the bound, which may be below 0: see `KVMemory.left`."""
        bound = min(self._keep_bytes, self._left())
        while self._idle and sum(idle.data.nbytes for idle in self._idle) > bound:
            self._idle.pop(0)

    def _make(self, size: int) -> Any:
        try:
            return self._allocate(size)
        except MemoryError:  # freeing the idle arenas may be enough
            with self._lock:
                self._idle.clear()
            return self._allocate(size)


class Reservation:
    """`nbytes` of KV memory, reserved until the last use has ended. A request, the connections that write its KV, and
    the engine that reads it use the same memory, and end in any order.

    Safe to use from any thread. free: called with the bytes that are free again: on the thread of the last use, and of
    `reduce`.
    """

    def __init__(self, nbytes: int, free: Callable[[int], None]) -> None:
        self.nbytes = nbytes
        self._free = free
        self._lock = threading.Lock()
        self._uses = 0
        self._freed = False

    @property
    def in_use(self) -> bool:
        return self._uses > 0

    def reduce(self, nbytes: int) -> None:
        """No more than so many bytes are needed from now on."""
        with self._lock:
            spare = 0 if self._freed else max(0, self.nbytes - nbytes)
            self.nbytes -= spare
        if spare:
            self._free(spare)

    def use(self) -> Callable[[], None]:
        """Begin one more use; the function that is returned ends it, once. Cancelled if the last use has ended."""
        with self._lock:
            if self._freed:
                raise Cancelled("the memory that was reserved for this KV has been released")
            self._uses += 1
        unended = [None]

        def end() -> None:
            with self._lock:
                if not unended:
                    return
                unended.pop()
                self._uses -= 1
                self._freed = self._uses == 0
                if not self._freed:
                    return
            self._free(self.nbytes)

        return end


def size_class(nbytes: int) -> int:
    """The smallest size of CLASSES per doubling that holds `nbytes`, so that prompts of similar length share arenas."""
    if nbytes <= CLASSES:
        return max(1, nbytes)
    step = 1 << max(0, (nbytes - 1).bit_length() - CLASSES.bit_length())
    return -(-nbytes // step) * step
