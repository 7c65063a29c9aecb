"""The transfer of one prompt's KV, from the request that asks for it to its end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from disagg.engines.base import EmittingEngine, PrefillEngine, PrefillRun, PrefillTiming, SendingEngine, SendingRun
from disagg.errors import Cancelled
from disagg.kv.frames import Header
from disagg.kv.sent import LinkWait, SentKV
from disagg.kv.transfer import Transfer

E = TypeVar("E", bound=PrefillEngine)


class Delivery(ABC, Generic[E]):
    """The transfer of a prompt's KV to `to`, as `header` states. tokens: all of the prompt; the KV is that of all but
    the last.

    `start` and `finish` are called on worker threads, the rest anywhere.
    """

    def __init__(
        self,
        engine: E,
        tokens: Sequence[int],
        to: tuple[str, int],
        header: Header,
        *,
        deadline: float,
        salt: str,
        beats: Callable[[], int],
    ) -> None:
        """beats: see Transfer."""
        self._engine, self._tokens, self._salt = engine, tokens, salt
        self._to, self._header, self._deadline, self._beats = to, header, deadline, beats
        self._ended = False

    @abstractmethod
    def start(self) -> PrefillRun:
        """The run that computes the prompt, and the transfer of its KV. Raises Cancelled after `end`."""

    @abstractmethod
    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        """Wait until the decode host has acknowledged all KV of a prompt that was computed so, with these waits for the
        link."""

    @abstractmethod
    def queued_bytes(self) -> int:
        """KV that waits to be sent."""

    @abstractmethod
    def end(self) -> None:
        """Abort the transfer unless it has finished. Does not wait."""


def delivery_by(
    engine: PrefillEngine,
    tokens: Sequence[int],
    to: tuple[str, int],
    header: Header,
    *,
    deadline: float,
    salt: str,
    beats: Callable[[], int],
) -> Delivery[Any]:
    """The delivery of a prompt's KV, by the engine if it sends KV itself."""
    if isinstance(engine, SendingEngine):
        return EngineDelivery(engine, tokens, to, header, deadline=deadline, salt=salt, beats=beats)
    assert isinstance(engine, EmittingEngine)
    return OwnDelivery(engine, tokens, to, header, deadline=deadline, salt=salt, beats=beats)


class OwnDelivery(Delivery[EmittingEngine]):
    """A Transfer of the blocks that the engine emits, opened when its computation begins."""

    _transfer: Transfer | None = None

    def start(self) -> PrefillRun:
        """See Delivery."""
        header = self._header
        send = self._open().send
        return self._engine.start(self._tokens[:-1], send, start=header.start, wire=header.wire, salt=self._salt)

    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        """See Delivery."""
        result = self._open().finish()
        self._ended = True
        return result.sent(timing.ended, timing.steps, waits)

    def queued_bytes(self) -> int:
        """See Delivery. 0 after a failure, which the next step is to find."""
        transfer = self._transfer
        return transfer.queued_bytes if transfer is not None and transfer.failed is None else 0

    def end(self) -> None:
        """See Delivery."""
        finished, self._ended = self._ended, True
        if self._transfer is not None and not finished:
            threading.Thread(target=self._transfer.abort, name="kv-abort", daemon=True).start()

    def _open(self) -> Transfer:
        if self._transfer is None:
            self._transfer = Transfer(*self._to, self._header, deadline=self._deadline, beats=self._beats)
            if self._ended:  # meanwhile
                self._transfer.abort()
        if self._ended:
            raise Cancelled("the request was cancelled before its KV was sent")
        return self._transfer


class EngineDelivery(Delivery[SendingEngine]):
    """A transfer by the engine itself. Closing the run, which its scheduler does, aborts it."""

    _run: SendingRun | None = None

    def start(self) -> PrefillRun:
        """See Delivery."""
        if self._ended:
            raise Cancelled("the request was cancelled before its KV was sent")
        self._run = self._engine.send(
            self._tokens[:-1],
            self._to,
            self._header,
            deadline=self._deadline,
            next_token=self._tokens[-1],
            salt=self._salt,
        )
        return self._run

    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        """See Delivery. The engine's workers know themselves when they computed, and never wait for the link."""
        assert self._run is not None, "nothing was started"
        return self._run.sent()

    def queued_bytes(self) -> int:
        """0: what waits is with the engine's workers. `Policy.kv_bytes` bounds it, for all started prompts together."""
        return 0

    def end(self) -> None:
        """See Delivery."""
        self._ended = True
