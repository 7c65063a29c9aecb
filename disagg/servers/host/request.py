"""One request while a server works on it, and its caller."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from disagg.api.events import Event, Timing
from disagg.api.requests import Share
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeTiming
from disagg.engines.model.constraint import Constraint
from disagg.errors import DeadlineExceeded, DisaggError
from disagg.kv.receive.tickets import IssuedTicket

T = TypeVar("T")
Phase = Literal[
    "tokenising", "queued", "waiting for KV", "receiving KV", "computing the prompt", "sending KV", "generating"
]
STATE_S: Final = 0.05

SendNow = Callable[[Callable[[], Sequence[Event]]], bool]
"""Sends the events that the function makes, without a task to wait in. False, and none are made, if the caller takes
none now or an earlier event still waits."""


def _unnoted(*_: object) -> None:
    """Nobody notes it down."""


@dataclass(slots=True)
class ActiveRequest:
    """A request from its arrival to its end. Times are time.monotonic().

    id: the caller's, for logs and the KV transfer. key: unique on this host. share: whose share of the host it counts
    for. tokens: the prompt, empty until it is tokenised, and the `answered` first tokens of the answer if another host
    has generated them. constraint: the form that the rest must have. bad_words: token sequences that it must not have.
    phase: what the request is doing, for the log. entered, computed: called with each phase, and once its prompt is
    computed, with the first token if it has any. leased: it ends if its caller does not extend its lease. cleanup:
    releases, however the request ends, everything it holds: its place and turn, its ticket, its KV, its row in the
    batch.
    """

    id: str
    sampling: Sampling
    arrived: float
    deadline: float
    share: Share = field(default_factory=Share)
    tokens: list[int] = field(default_factory=list)
    answered: int = 0
    constraint: Constraint | None = None
    bad_words: Sequence[Sequence[int]] = ()
    hold_prompt: bool = False
    entered: Callable[[Phase], None] = _unnoted
    computed: Callable[[], None] = _unnoted
    leased: bool = False
    tokenised: float = 0.0
    slot_sent: float = 0.0
    slot: IssuedTicket | None = None
    phase: Phase = "tokenising"
    cleanup: ExitStack = field(default_factory=ExitStack)
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def enter(self, phase: Phase) -> None:
        """The request comes to this phase."""
        self.phase = phase
        self.entered(phase)

    async def within_deadline(self, work: Awaitable[T], not_done: str) -> T:
        """Await until the deadline. Raises DeadlineExceeded, which says what was not done."""
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"{not_done} by the request's deadline", "raise the timeout") from None

    @property
    def stated_phase(self) -> Phase:
        """The phase that progress events state: `phase`, or "receiving KV" once the KV has begun to arrive."""
        if self.phase == "waiting for KV" and self.slot is not None and self.slot.state != "issued":
            return "receiving KV"
        return self.phase

    @property
    def waits(self) -> bool:
        """Whether nothing has begun for this request, here or on another host."""
        return self.phase in ("tokenising", "queued") and not self.slot_sent

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) - self.answered

    @property
    def tokenise_s(self) -> float:
        return self.tokenised - self.arrived

    def timing(
        self,
        turn_s: float,
        engine: DecodeTiming,
        kv_accepted: float | None,
        decode_s: float,
        refuted_s: float = 0.0,
        *,
        resumed: bool = False,
    ) -> Timing:
        """This host's parts of the request. `turn_s`: waiting for a turn. `kv_accepted`: when, None without KV.
        `refuted_s`: see Timing. `resumed`: not all of the KV came, and the rest was computed here.

        Without all KV the first decode step is part of the prompt's compute. A turn before the last KV was accepted, of
        a prompt that both hosts computed, was no wait.
        """
        first_step_s = engine.first_token - engine.ingested
        queue_s = turn_s + engine.started - engine.submitted
        if kv_accepted is None:
            times = {"queue_s": queue_s, "compute_s": first_step_s, "decode_s": decode_s, "refuted_s": refuted_s}
            return Timing(self.tokenise_s, **times)
        queue_s = max(0.0, min(queue_s, engine.started - kv_accepted))
        after_s = max(0.0, engine.ingested - kv_accepted - queue_s)  # until the KV of all layers was there
        tail_s = min(engine.tail_s, after_s)
        return Timing(
            self.tokenise_s,
            kv_wait_s=max(0.0, kv_accepted - self.slot_sent),
            queue_s=queue_s,
            ingest_s=after_s - tail_s,
            compute_s=first_step_s if resumed else 0.0,
            first_step_s=0.0 if resumed else first_step_s,
            tail_s=tail_s,
            tail_compute_s=engine.tail_compute_s,
            decode_s=decode_s,
            audit_s=engine.audit_s,
        )


class Caller:
    """The caller of one request. Create it on the event loop.

    The service sets `request` when it admits it, and may `end` it at any time: the stream then sends the error at
    once, even if the request's own task is stuck, and cancels that task.
    """

    def __init__(
        self,
        request_id: str,
        progress: Callable[[], Awaitable[None]] | None = None,
        send_now: SendNow = lambda _: False,
    ) -> None:
        """progress: sends a progress event."""
        self.request_id = request_id
        self.request: ActiveRequest | None = None
        self.send_now = send_now
        self.stated = ""  # the phase in the last progress event
        self._progress = progress
        self.ended: asyncio.Future[DisaggError] = asyncio.get_running_loop().create_future()

    @property
    def phase(self) -> str:
        return self.request.stated_phase if self.request else "arriving"

    async def state_begin(self) -> None:
        """The request is about to be computed. A caller that knows only that it waits is told so first: if this process
        ends now, the caller takes the request for a suspect, see disagg/strikes.py. Waits STATE_S at most."""
        if self.stated == "queued" and self._progress is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STATE_S):
                    await self._progress()

    @property
    def error(self) -> DisaggError | None:
        """Why the service has ended the request; None if it has not."""
        return self.ended.result() if self.ended.done() else None

    def end(self, error: DisaggError) -> None:
        """End the request with this error. Only the first call has an effect."""
        if not self.ended.done():
            self.ended.set_result(error)
