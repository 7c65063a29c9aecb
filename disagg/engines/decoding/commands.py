"""What other threads want done on the engine's thread: a queue of functions. What they ask of the engine beside
requests: to run a function between two steps, to score a prompt, and what it holds of requests that have ended."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from disagg.engines.base import ChunkScores, HeldKV
from disagg.engines.decoding.batch import Backend
from disagg.errors import DisaggError, ModelError

Run = Callable[[], object]
Fail = Callable[[DisaggError], object]
_Result = TypeVar("_Result")


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


class Calls(ABC):
    """Mixed into a DecodeEngine, whose thread runs its `_commands`."""

    _backend: Backend
    _commands: Commands
    _closed: bool

    @abstractmethod
    def _require_open(self) -> None:
        """Raise what ended the engine, if it has ended. With the lock of the commands."""

    def call(self, function: Callable[[Any], _Result]) -> _Result:
        """Run `function(backend)` on the thread, between two steps, and wait for its result."""
        future: Future[_Result] = Future()
        with self._commands.changed:
            self._require_open()
            self._commands.post(lambda: future.set_result(function(self._backend)), future.set_exception)
        return future.result()

    def score(
        self, tokens: Sequence[int], top: int, emit: Callable[[ChunkScores], None], cancelled: Callable[[], bool]
    ) -> None:
        """Score all tokens but the first, a chunk between two steps of the batch: `emit` gets those of each chunk.
        Waits for the end, or until it is cancelled. top: how many alternatives each token has."""
        scoring = self.call(lambda backend: backend.scoring(tokens, top))
        try:
            while scoring.remaining and not cancelled():
                emit(self.call(lambda backend: scoring.step()))
        finally:
            with suppress(DisaggError):  # the thread has ended, and its arrays with it
                self.call(lambda backend: scoring.close())

    def find_held(self, tokens: Sequence[int], salt: str) -> HeldKV | None:
        """The longest held KV that a request with these tokens and this salt can go on from. It is shorter than
        `tokens`; None if there is none. Release it in any case."""
        return self._backend.held.find(tokens[:-1], salt)

    @property
    def held_bytes(self) -> int:
        """Bytes of held KV; not part of `kv_bytes`."""
        return self._backend.held.nbytes

    def give_up_held(self, nbytes: int) -> None:
        """Drop at least `nbytes` of held KV, the least recently used first, if so much is not in use by a request."""
        self._free(self._backend.held.give_up(nbytes))

    def forget_held(self, tokens: Sequence[int], salt: str) -> None:
        """Drop what is held of this prompt, and of all that begin with the same tokens, because it may be wrong.
        Requests that use it go on."""
        self._free(self._backend.held.forget(tokens, salt))

    def _free(self, dropped: list[Any]) -> None:
        """The thread frees the memory of held KV that was dropped, for it owns the arrays."""
        with self._commands.changed:
            if dropped and not self._closed:
                self._commands.post(dropped.clear, lambda error: None)


def as_disagg(error: Exception, what: str) -> DisaggError:
    """The error as one of disagg's."""
    if isinstance(error, DisaggError):
        return error
    return ModelError(f"{what}: {type(error).__name__}: {error}", "send the request again; the engine still runs")
