"""What other threads ask of a decode engine beside requests: to run a function between two steps, to score a prompt,
and what it holds of requests that have ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from disagg.engines.base import ChunkScores, HeldKV
from disagg.engines.decoding.batch import Backend
from disagg.engines.decoding.commands import Commands
from disagg.errors import DisaggError

_Result = TypeVar("_Result")


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
