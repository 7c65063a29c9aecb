"""One request from its beginning to its end: what happens to it is counted here, once, and its observers are told."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from disagg.api.gateway import EntryState
from disagg.api.names import RequestPhase
from disagg.gateway.dialects.base import Head, Prompt
from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion, Stage

SETTLE_S: Final = 0.1  # the longest that the end of an answer waits until it is recorded
_ORDER: Final[Sequence[RequestPhase]] = ("queue", "loading", "prefill", "transfer", "decode")
WAITING: Final = ("queue", "loading")
"""The phases in which no host computes anything of a request."""

log = logging.getLogger("disagg.gateway")


class Observer:
    """Is told what happens to requests, on the event loop; each method returns at once. All else is in the request."""

    def accepted(self, request: ObservedRequest) -> None:
        """A request has begun."""

    def generated(self, request: ObservedRequest, choice: int, tokens: int) -> None:
        """So many more tokens of an answer have arrived."""

    def completed(self, request: ObservedRequest, choice: int) -> None:
        """An answer is complete."""

    def ended(self, request: ObservedRequest) -> None:
        """A request has ended."""

    def refused(self, problem: Problem) -> None:
        """A request was refused before it began."""


class Observers:
    """All observers of one gateway. None of them can fail a request or hold it up. settle: returns when everything so
    far is recorded; it may take any time. keep_text: whether requests have their prompts."""

    def __init__(
        self,
        observers: Sequence[Observer],
        settle: Callable[[], Awaitable[None]] | None = None,
        *,
        keep_text: bool = False,
    ) -> None:
        self._observers = list(observers)
        self._settle = settle
        self._keep_text = keep_text
        self._numbers = itertools.count(1)
        self._failed: set[int] = set()

    def accept(
        self,
        head: Head,
        api: str,
        model: str,
        key: str | None,
        key_id: str | None = None,
        *,
        charge: Callable[[int], None] = lambda _: None,
    ) -> ObservedRequest:
        """A request begins. api: the dialect. model: its canonical name. key, key_id: name and id of the caller's key,
        None without keys. charge: is called with the tokens of prompts and answers as they come."""
        request = ObservedRequest(
            number=next(self._numbers),
            head=head,
            api=api,
            model=model,
            key=key,
            key_id=key_id,
            prompts=tuple(map(_text, head.request.prompts)) if self._keep_text else None,
            answers=[ObservedAnswer() for _ in range(head.request.choices)],
            observers=self,
            charge=charge,
        )
        self.tell(lambda one: one.accepted(request))
        return request

    def refuse(self, problem: Problem) -> None:
        """A request was refused before it began."""
        self.tell(lambda one: one.refused(problem))

    def tell(self, event: Callable[[Observer], None]) -> None:
        """Tell all observers. One that raises is logged once, and told what follows nevertheless."""
        for number, observer in enumerate(self._observers):
            try:
                event(observer)
            except Exception as error:  # a bug in an observer must not fail a request
                if number not in self._failed:
                    self._failed.add(number)
                    log.error("observer_failed: %s", type(observer).__name__, exc_info=error)

    async def settle(self) -> None:
        """Wait until everything is recorded, at most SETTLE_S."""
        if self._settle is None:
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._settle()
        except TimeoutError:
            log.debug("history did not settle in %g s", SETTLE_S)


@dataclass(slots=True)
class ObservedAnswer:
    """One answer of a request. stage: its last one. tokens: that have arrived. began, arrived: when its first text
    and its last tokens did, by time.monotonic(); gap: between those and the ones before them. completion: once it is
    complete."""

    stage: Stage | None = None
    tokens: int = 0
    began: float | None = None
    arrived: float | None = None
    gap: float | None = None
    completion: Completion | None = None

    @property
    def done(self) -> Completion:
        """The answer, which is complete."""
        assert self.completion is not None
        return self.completion

    @property
    def fell_back(self) -> bool:
        """Whether the answer, which is complete, came about without its hand-off, or without a decode host."""
        left = self.stage is not None and self.stage.reason == "no decode host is left"
        return left or self.done.metrics.method == "fallback"


@dataclass(slots=True, kw_only=True, eq=False)
class ObservedRequest:
    """One request.

    number: unique in this gateway. prompts: their texts, None if they are not kept. answers: by number. charge: see
    `Observers.accept`. began: by time.monotonic(). phase: that of its answer that is furthest behind; phase_began: None
    until it is another one than the first. tokens: of all answers, as far as they have arrived; prompt_tokens: of all
    prompts that a host has counted, of which one that is answered several times counts once. state, problem, seconds:
    how it ended, why it failed, and how long it took; state is None until then.
    """

    number: int
    head: Head
    api: str
    model: str
    key: str | None
    key_id: str | None
    prompts: tuple[str, ...] | None
    answers: list[ObservedAnswer]
    observers: Observers
    charge: Callable[[int], None]
    began: float = field(default_factory=time.monotonic)
    phase: RequestPhase = "queue"
    phase_began: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    state: EntryState | None = None
    problem: Problem | None = None
    seconds: float = 0.0
    _counted: set[int] = field(default_factory=set)  # prompts

    @property
    def open(self) -> list[ObservedAnswer]:
        """The answers that are not complete."""
        return [one for one in self.answers if one.completion is None]

    @property
    def completions(self) -> list[Completion]:
        """The answers that are complete."""
        return [one.completion for one in self.answers if one.completion is not None]

    @property
    def waiting(self) -> bool:
        """Whether every answer waits in a queue or for a load, and nothing of any has arrived."""
        return all(
            one.began is None and one.completion is None and (one.stage is None or one.stage.phase in WAITING)
            for one in self.answers
        )

    @property
    def refused(self) -> bool:
        """Whether the request itself is wrong: no host has failed."""
        status = self.problem.status if self.problem else 0
        return 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS

    def entered(self, choice: int, stage: Stage) -> None:
        """An answer has entered this stage."""
        self.answers[choice].stage = stage
        self._count_prompt(choice, stage.prompt_tokens)
        self._move()

    def generated(self, choice: int, tokens: int) -> None:
        """More tokens, or text without tokens of its own, have arrived."""
        now, answer = time.monotonic(), self.answers[choice]
        if answer.began is None:
            answer.began = now
        if tokens:
            answer.gap = None if answer.arrived is None else now - answer.arrived
            answer.arrived = now
            answer.tokens += tokens
            self.tokens += tokens
            self.charge(tokens)
            self.observers.tell(lambda one: one.generated(self, choice, tokens))

    def completed(self, choice: int, completion: Completion) -> None:
        """An answer is complete. A whole-request host counts its tokens at the end only."""
        metrics, answer = completion.metrics, self.answers[choice]
        if metrics.method == "whole":
            self.generated(choice, max(0, metrics.completion_tokens - answer.tokens))
        answer.completion = completion
        self._count_prompt(choice, metrics.prompt_tokens)
        self._move()
        self.observers.tell(lambda one: one.completed(self, choice))

    async def settle(self) -> None:
        """Wait, for a short time only, until everything so far is recorded: before an answer's end is sent."""
        await self.observers.settle()

    def ended(self, problem: Problem | None = None) -> None:
        """The request is over: failed, if there is a problem; else cancelled, unless all answers are complete. A second
        call does nothing."""
        if self.state is None:
            self.state = "failed" if problem is not None else "cancelled" if self.open else "ok"
            self.problem, self.seconds = problem, time.monotonic() - self.began
            self.observers.tell(lambda one: one.ended(self))

    def _move(self) -> None:
        """Find the phase anew. Answers that have no stage are in the queue."""
        phases = [one.stage.phase if one.stage else "queue" for one in self.open]
        phase = min(phases, key=_ORDER.index, default=self.phase)
        if phase != self.phase:
            self.phase, self.phase_began = phase, time.monotonic()

    def _count_prompt(self, choice: int, tokens: int) -> None:
        prompt = choice // self.head.request.n
        if tokens and prompt not in self._counted:
            self._counted.add(prompt)
            self.prompt_tokens += tokens
            self.charge(tokens)


def _text(prompt: Prompt) -> str:
    """The prompt as one text; empty if it is given as token ids."""
    messages = prompt.get("messages")
    if messages is None:
        return prompt.get("prompt", "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in messages)
