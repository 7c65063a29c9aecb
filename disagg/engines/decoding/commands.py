"""What other threads want done on the engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from disagg.errors import DisaggError, ModelError

Run = Callable[[], object]
Fail = Callable[[DisaggError], object]


class Commands:
    """A queue of functions for one thread. changed: its lock, and what the thread waits for; others may guard their own
    state with it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._queue: deque[tuple[Run, Fail]] = deque()  # bounded: at most two per job, and one per waiting caller

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, run: Run, fail: Fail) -> None:
        """Queue a function and wake the thread. fail: gets the error if `run` raises, or the thread ends before it."""
        with self.changed:
            self._queue.append((run, fail))
            self.changed.notify()

    def run_first(self) -> None:
        """Run the first function. A method of its own, so that a waiting thread does not reference the KV of it."""
        with self.changed:
            run, fail = self._queue.popleft()
        try:
            run()
        except Exception as error:  # noqa: BLE001 - an error of the framework in one command is that command's error
            fail(as_disagg(error, "the decode engine failed to run a command"))
        except BaseException:  # the thread ends: `take_all` fails this command and the others
            with self.changed:
                self._queue.appendleft((run, fail))
            raise

    def take_all(self) -> list[Fail]:
        """Empty the queue. Returns what fails each command in it with an error: their functions do not run."""
        with self.changed:
            failed = [fail for _, fail in self._queue]
            self._queue.clear()
            return failed


def as_disagg(error: Exception, what: str) -> DisaggError:
    """The error as one of disagg's."""
    if isinstance(error, DisaggError):
        return error
    return ModelError(f"{what}: {type(error).__name__}: {error}", "send the request again; the engine still runs")
