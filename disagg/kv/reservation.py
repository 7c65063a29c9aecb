"""Reserved KV memory that several use: a request, the connections that write its KV, the engine that reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from disagg.errors import Cancelled


class Reservation:
    """`nbytes` of KV memory, reserved until the last use has ended, in whichever order they end.

    Safe to use from any thread. free: called once with `nbytes`, on the thread of the last use.
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
