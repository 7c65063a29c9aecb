"""One request's answer while it arrives, from one host or, if hosts fail, from several in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from disagg.api.events import DoneEvent, Event, LocalEvent, ShippedEvent, SlotEvent, TokenLogprob, TokensEvent
from disagg.api.names import RequestPhase
from disagg.api.requests import GenerateBody, ToolCall
from disagg.errors import Partial
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.plausible import AnswerBounds
from disagg.inference.metrics import Trace, metrics
from disagg.inference.types import Chunk, Completion, Stage, Watch, unwatched

FALLBACK_WARNING = "Using fallback mode - slower performance"
SIMULATED_WARNING = "simulated: no model ran, the times are predicted and the text is noise"

_PHASES: Final[Mapping[str, RequestPhase]] = {
    "tokenising": "queue",
    "queued": "queue",
    "computing the prompt": "prefill",
    "sending KV": "transfer",
    "generating": "decode",
}
"""A request's phase by what a host's progress event states. "waiting for KV" is left out: the prefill host says
more."""

Deliver = Callable[[Chunk], None]


class AttemptOutcome(NamedTuple):
    """How a successful attempt ended. `shipped`: the prefill host's figures of a hand-off, if they arrived."""

    done: DoneEvent
    shipped: ShippedEvent | None = None
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class ArrivingAnswer:
    """What has arrived of one answer.

    trace: the times of the attempt that runs. notes: warnings that the caller got meanwhile. stage: what the request
    is doing; `watch` is called when it changes. request_id: the beginning of its ids on the hosts. on_first_token:
    called with the first token of the attempt that runs. loading_s: for which it has waited for models to be loaded.
    """

    model: str
    called: float
    deliver: Deliver
    watch: Watch = unwatched
    request_id: str = ""
    stage: Stage | None = None
    trace: Trace = field(init=False)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deferred_notes: list[str] = field(default_factory=list)  # of `note_with_answer`
    on_first_token: Callable[[], None] | None = None
    loading_s: float = 0.0
    brought: bool = False  # some of the answer, by the attempt that runs
    bounds: AnswerBounds | None = None  # of the attempt that runs; None for whole-request hosts, which count otherwise

    def begin(self, attempt: Attempt, began: float, on_first_token: Callable[[], None] | None = None) -> None:
        """The next attempt goes on after what has arrived."""
        self.on_first_token, self.bounds, self.brought = on_first_token, None, False
        before = self.trace if self.tokens else None
        self.trace = Trace(attempt, self.model, self.called, began, loading_s=self.loading_s)
        if before is not None:
            self.trace.follow(before, len(self.tokens))
        self.stage = None
        self.enter("queue")

    def waits_for_load(self, attempt: Attempt) -> None:
        """Before this attempt begins its hosts load the model."""
        self.stage = stage_of(attempt, "loading")
        self.watch(self.stage)

    def enter(self, phase: RequestPhase, prompt_tokens: int = 0, held_tokens: int = 0) -> None:
        """The request comes to this phase of the attempt that runs. The tokens: 0 if no host has counted them anew."""
        if self.stage is not None:
            prompt_tokens = prompt_tokens or self.stage.prompt_tokens
            held_tokens = held_tokens or self.stage.held_tokens
        stage = stage_of(self.trace.attempt, phase, prompt_tokens, held_tokens)
        if stage != self.stage:
            self.stage = stage
            self.watch(stage)

    def reported(self, phase: str) -> None:
        """A host's progress event states this phase."""
        known = phase_of(phase)
        if known is not None and not (self.stage is not None and self.stage.phase == "decode"):
            self.enter(known)

    def body(self, body: GenerateBody, deadline_s: float, lease_s: float) -> GenerateBody:
        """The request as the next host gets it: with the tokens that have arrived, and the time that is left."""
        ids = tuple(token.id for token in self.tokens)
        return msgspec.structs.replace(body, answer_tokens=ids, deadline_s=deadline_s, lease_s=lease_s)

    def take(self, event: Event) -> DoneEvent | None:
        """Note one event's tokens and deliver them; returns the event if it is the last one. Raises InvalidAnswer if it
        does not fit the request."""
        if self.bounds is not None:
            self.bounds.require_fits(event)
        while self.deferred_notes:
            self.note(self.deferred_notes.pop(0))
        if isinstance(event, TokensEvent):
            self._deliver(event, time.monotonic())
        elif isinstance(event, LocalEvent | SlotEvent):
            self.enter("prefill", event.prompt_tokens, event.held_tokens)
        elif isinstance(event, DoneEvent):
            self.trace.ended(time.monotonic())
            return event
        return None

    def _deliver(self, event: TokensEvent, now: float) -> None:
        if not self.brought:
            self._first_of_attempt(now)
        self.trace.last_token = now
        self.texts.append(event.text)
        self.tokens.extend(event.tokens)
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        if event.tool_calls:
            self.tool_calls.extend(event.tool_calls)
        self.deliver(Chunk(event.text, event.tokens, now, "", event.reasoning, event.tool_calls))

    def _first_of_attempt(self, now: float) -> None:
        self.brought = True
        self.enter("decode")
        if self.on_first_token is not None:
            self.on_first_token()
            self.on_first_token = None
        self.trace.first_token = self.trace.first_token or now

    def note_with_answer(self, text: str) -> None:
        """Note this once something of the answer arrives; if nothing does, it is not noted."""
        self.deferred_notes.append(text)

    def note(self, text: str) -> None:
        """Send the caller a note about the request, on the stream and among the warnings."""
        if text not in self.notes:
            self.notes.append(text)
            self.deliver(Chunk("", (), time.monotonic(), text))

    @property
    def begun(self) -> bool:
        """Whether some of the answer has arrived. Pieces of whole-request hosts have no tokens."""
        return bool(self.tokens or self.texts)

    @property
    def partial(self) -> Partial | None:
        return Partial("".join(self.texts), tuple(token.id for token in self.tokens)) if self.begun else None

    def completion(self, outcome: AttemptOutcome) -> Completion:
        done = outcome.done
        if self.trace.resumed_tokens:
            done = msgspec.structs.replace(done, completion_tokens=len(self.tokens) or 1)
        warnings = [*self.notes, *outcome.warnings]
        if done.simulated:
            warnings.append(SIMULATED_WARNING)
        figures = metrics(self.trace, done, outcome.shipped)
        return Completion(
            "".join(self.texts),
            tuple(self.tokens),
            done.finish_reason,
            figures,
            tuple(warnings),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.tool_calls),
            reasoning_tokens=done.reasoning_tokens,
            stop=done.stop,
        )


def phase_of(reported: str) -> RequestPhase | None:
    """The phase of a request whose host reports this one; None if that says nothing new."""
    return _PHASES.get(reported)


def stage_of(attempt: Attempt, phase: RequestPhase, prompt_tokens: int = 0, held_tokens: int = 0) -> Stage:
    """The stage of a request that performs this attempt."""
    prefill = attempt.prefill.name if attempt.prefill else None
    decode = attempt.decode.name if attempt.decode else None
    return Stage(phase, attempt.method, prefill, decode, prompt_tokens, held_tokens, attempt.reason)
