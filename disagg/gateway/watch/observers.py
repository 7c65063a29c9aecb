"""Passes what happens to requests on to all who watch. No observer can fail a request or hold it up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from disagg.gateway.dialects.base import Head, Prompt
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.watch.events import (
    Accepted,
    Completed,
    Ended,
    Generated,
    Refused,
    RequestEvent,
    StageEntered,
    State,
)
from disagg.inference.types import Completion, Stage

SETTLE_S: Final = 0.1  # the longest that the end of an answer waits until it is recorded

log = logging.getLogger("disagg.gateway")


class Observer(Protocol):
    """`notify` is called with every event, on the event loop, and returns at once."""

    def notify(self, event: RequestEvent) -> None: ...


class Observers:
    """All observers of one gateway. settle: returns when all events so far are recorded; it may take any time.

    keep_text: whether events have the prompts.
    """

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

    def accept(self, head: Head, api: str, model: str, key: str | None, key_id: str | None = None) -> ObservedRequest:
        """A request begins. model: its canonical name. key, key_id: name and id of the caller's key."""
        prompts = tuple(_text(prompt) for prompt in head.request.prompts) if self._keep_text else None
        request = Accepted(
            next(self._numbers),
            head.request_id,
            api,
            model,
            key,
            head.request.choices,
            head.created,
            time.monotonic(),
            prompts,
            key_id,
        )
        self.notify(request)
        return ObservedRequest(self, request)

    def refuse(self, model: str, problem: Problem) -> None:
        """A request was refused before it began."""
        self.notify(Refused(model, problem))

    def notify(self, event: RequestEvent) -> None:
        """Notify all observers. One that raises is logged once, and gets the next event nevertheless."""
        for number, observer in enumerate(self._observers):
            try:
                observer.notify(event)
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


class ObservedRequest:
    """One request from its beginning to its end."""

    def __init__(self, observers: Observers, request: Accepted) -> None:
        self._observers, self.request = observers, request
        self._stages: dict[int, Stage] = {}
        self._tokens: dict[int, int] = {}
        self._first: dict[int, float] = {}
        self._complete: set[int] = set()
        self._over = False

    @property
    def waiting(self) -> bool:
        """Whether every answer waits in a queue, and nothing of any has arrived."""
        return not (self._first or self._complete) and all(stage.phase == "queue" for stage in self._stages.values())

    def entered(self, choice: int, stage: Stage) -> None:
        """An answer has entered this stage."""
        self._stages[choice] = stage
        self._observers.notify(StageEntered(self.request, choice, stage))

    def generated(self, choice: int, tokens: int) -> None:
        """More tokens, or text without tokens of its own, have arrived."""
        now = time.monotonic()
        self._first.setdefault(choice, now)
        before = self._tokens.get(choice, 0)
        self._tokens[choice] = before + tokens
        if tokens:
            self._observers.notify(Generated(self.request, choice, tokens, before == 0, now))

    def completed(self, choice: int, completion: Completion) -> None:
        """An answer is complete."""
        self._complete.add(choice)
        self._observers.notify(Completed(self.request, choice, completion, self._stages.get(choice)))

    async def settle(self) -> None:
        """Wait, for a short time only, until all events so far are recorded: before an answer's end is sent."""
        await self._observers.settle()

    def ended(self, problem: Problem | None, *, cancelled: bool) -> None:
        """The request is over. A second call does nothing."""
        if self._over:
            return
        self._over = True
        open_choices = [choice for choice in range(self.request.choices) if choice not in self._complete]
        state: State = "failed" if problem is not None else "cancelled" if cancelled and open_choices else "ok"
        tokens = sum(self._tokens.get(choice, 0) for choice in open_choices)
        stage = next((self._stages[choice] for choice in open_choices if choice in self._stages), None)
        began = self.request.began
        ttft = min((self._first[choice] - began for choice in open_choices if choice in self._first), default=None)
        seconds = time.monotonic() - began
        self._observers.notify(Ended(self.request, state, problem, seconds, tokens, stage, ttft))


def _text(prompt: Prompt) -> str:
    """The prompt as one text; empty if it is given as token ids."""
    messages = prompt.get("messages")
    if messages is None:
        return prompt.get("prompt", "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in messages)
