"""Memory for arriving KV: one arena per transfer, reused by later ones.

An arena is whatever the decode engine can compute from without copying it (mlx's arrays are memory that a socket can
fill). Fresh memory costs a page fault per page, for 800 MB more than the transfer itself; memory that was used before
costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disagg.errors import Overloaded

__all__ = ["Allocate", "Arena", "Arenas", "allocate_numpy"]

CLASSES = 8  # sizes per doubling: a new arena is at most an eighth larger than what was asked for
SLACK = 4  # a used one may be larger by one part in so many: the budget counts what was asked for

Buffer = Any  # numpy.ndarray of uint8, C-contiguous
# (bytes) -> an object with a writable, contiguous buffer of at least that size; from any thread.
# MemoryError without room.
Allocate = Callable[[int], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """`memory`: the engine's own object; `data`: all of its bytes, as a uint8 array."""

    memory: Any
    data: Buffer

    @classmethod
    def over(cls, memory: Any) -> Arena:
        """An arena over any object with a writable buffer."""
        import numpy

        return cls(memory, numpy.frombuffer(memory, numpy.uint8))


def allocate_numpy(nbytes: int) -> Buffer:
    """Memory of no framework."""
    import numpy

    return numpy.empty(nbytes, numpy.uint8)


class Arenas:
    """Arenas to take and to give back. Safe to use from any thread.

    keep_bytes: how much memory may lie idle here; never more than `left()`, what the budget leaves for it.
    An arena that is not given back is freed with its last user.
    No arena is more than 1.41 times as large as what it was taken for.
    """

    def __init__(
        self, allocate: Allocate = allocate_numpy, *, keep_bytes: int = 0, left: Callable[[], int] | None = None
    ) -> None:
        self._allocate = allocate
        self._keep_bytes = keep_bytes
        self._left = left or (lambda: keep_bytes)
        self._lock = threading.Lock()
        self._idle: list[Arena] = []  # the one given back last comes last

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that nobody uses at the moment."""
        with self._lock:
            return sum(arena.data.nbytes for arena in self._idle)

    def acquire(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`, what it holds being anything. Overloaded where there is no memory."""
        size = size_class(nbytes)
        with self._lock:
            fitting = [arena for arena in self._idle if size <= arena.data.nbytes <= size + size // SLACK]
            if fitting:
                best = min(fitting, key=lambda arena: arena.data.nbytes)
                self._idle.remove(best)
                return best
            self._bound()
        try:
            return Arena.over(self._make(size))
        except MemoryError as error:
            raise Overloaded(f"no memory for {nbytes} bytes of KV: {error}") from error

    def release(self, arena: Arena) -> None:
        """Offer an arena that nobody reads any more to the next transfer; the oldest idle ones make room for it. One
        that is larger than all that may be kept goes by itself."""
        if arena.data.nbytes > self._keep_bytes:
            return
        with self._lock:
            self._idle.append(arena)
            self._bound()

    def _bound(self) -> None:
        """Let the oldest idle arenas go until the rest may be kept."""
        most = min(self._keep_bytes, self._left())
        while sum(idle.data.nbytes for idle in self._idle) > most:
            self._idle.pop(0)

    def _make(self, size: int) -> Any:
        try:
            return self._allocate(size)
        except MemoryError:  # what lies idle here may be what is missing
            with self._lock:
                self._idle.clear()
            return self._allocate(size)


def size_class(nbytes: int) -> int:
    """The smallest size of CLASSES per doubling that holds `nbytes`, so that prompts of similar length share arenas."""
    if nbytes <= CLASSES:
        return max(1, nbytes)
    step = 1 << max(0, (nbytes - 1).bit_length() - CLASSES.bit_length())
    return -(-nbytes // step) * step
