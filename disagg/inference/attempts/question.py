"""A question about a prompt that any one host of its model can answer: they are asked in turn until one does. One is
how many tokens it has: POST /count, which tokenises it and computes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from disagg.api.requests import CountBody, PromptBody, body_limit
from disagg.api.status import CountAnswer
from disagg.config import Host
from disagg.errors import (
    CapabilityMissing,
    DeadlineExceeded,
    DisaggError,
    KVMemoryExceeded,
    Overloaded,
    ProtocolError,
    RequestError,
)
from disagg.inference.attempts.driver import FIRST_LOADS_S, Driver, GenerationRequest
from disagg.inference.attempts.suspects import Asked, Suspicion, broke_off
from disagg.inference.attempts.waking import was_unloaded
from disagg.inference.http import host_calls
from disagg.inference.policy import longest_wait_s

HOST_S: Final = 20.0
"""How long each step of one host's answer may take; the longest prompts take seconds to tokenise. Less if the next host
would else have too little time."""

WAKES: Final = 5
"""How often a host loads its model for one question."""

R = TypeVar("R")
Body = TypeVar("Body", bound=PromptBody)


@dataclass(frozen=True, slots=True)
class Asking(Generic[Body]):
    """One host is asked. left_s: seconds until the deadline. last: there is no other host. sent: is set once the host
    may have begun."""

    host: Host
    body: Body
    left_s: float
    last: bool
    sent: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Question(Generic[Body, R]):
    """ask: asks one host. waits: hosts that are busy are asked again. failure: the last one, of a host that could
    answer at all if there is any."""

    driver: Driver
    request: GenerationRequest
    body: Body
    ask: Callable[[Asking[Body]], Awaitable[R]]
    waits: bool = False
    suspicion: Suspicion = field(init=False)
    failure: DisaggError | None = None

    def __post_init__(self) -> None:
        self.suspicion = Suspicion(self.driver.suspects, self.body, self.request.policy)

    async def to_one_of(self, hosts: Sequence[Host], unable: CapabilityMissing) -> R:
        """What the first of these hosts answers that does. Raises the last one's error if none does, that of a busy one
        if it is waited for, the first one's if the request is wrong, RequestEndedHosts if hosts end with it, and
        `unable` if there are none."""
        suspicion, busy = self.suspicion, None
        suspicion.look()
        for host in hosts:
            boot_id, sent = self.driver.view.of(host.name).boot_id, asyncio.Event()
            try:
                return await self._ask_awake(host, host is hosts[-1], sent)
            except DisaggError as error:
                if isinstance(error, RequestError) and not isinstance(error, KVMemoryExceeded):
                    raise
                if self.failure is None or not isinstance(error, CapabilityMissing):
                    self.failure = error
                busy, failed = error if self.waits and isinstance(error, Overloaded) else busy, error
            if sent.is_set() and broke_off(failed):
                await suspicion.broke_off([Asked(self.driver.view.addressed(host), boot_id, True)], failed)
                await suspicion.take_turn(bool)
        raise busy or self.failure or unable

    async def _ask_awake(self, host: Host, last: bool, sent: asyncio.Event) -> R:
        """What this host answers once its model is loaded; it may be unloaded again before the question comes."""
        view = self.driver.view
        for left in reversed(range(WAKES)):
            awake = await self.driver.loads.ready(host)
            kept, sent_s = view.of(host.name).kept, self.request.called + self.body.deadline_s - time.monotonic()
            body = replace(self.body, standing=self.suspicion.standing)
            try:
                return await self.ask(Asking(awake, body, sent_s, last, sent))
            except DisaggError as error:
                unloaded = kept is not None and await was_unloaded(
                    self.driver.refresher, view, awake, error, kept, sent=sent.is_set()
                )
                if not unloaded or not left:
                    raise
                sent.clear()
        raise AssertionError("the last time returns or raises")


async def count(driver: Driver, request: GenerationRequest, *, list_tokens: bool = False) -> CountAnswer:
    """Tokens of the request's prompt. Asks its hosts in turn, those first that can take a request, until one answers.
    list_tokens: with the tokens themselves.

    Raises what `Question.to_one_of` raises, and DeadlineExceeded.
    """
    body, now = CountBody(**request.body.of_prompt, list_tokens=list_tokens), time.monotonic()
    most = body_limit(request.candidates.context) if list_tokens else host_calls.MAX_EVENT_BYTES
    hosts = [*request.candidates.decode, *request.candidates.prefill]
    await driver.refresher.read(driver.refresher.stale(hosts), FIRST_LOADS_S)
    hosts.sort(key=lambda host: (*driver.view.until_begun(host, now), driver.view.of(host.name).ahead))

    async def ask(asking: Asking[CountBody]) -> CountAnswer:
        seconds = HOST_S if asking.last else min(HOST_S, longest_wait_s(asking.left_s))
        answer = await host_calls.post(
            driver.http, asking.host, "/count", asking.body, timeout=seconds, sent=asking.sent.set, most=most
        )
        counted = CountAnswer.received(answer, asking.host.name)
        if list_tokens and not (counted.prompt_tokens == len(counted.tokens) == len(counted.texts)):
            raise ProtocolError(f"{asking.host.name} counted {counted.prompt_tokens} tokens and listed others")
        return counted

    counting = Question(driver, request, body, ask)
    unable = CapabilityMissing(
        f"no host of {body.model} counts tokens: whole-request hosts have no call for it", "send the request"
    )
    try:
        async with asyncio.timeout(body.deadline_s):
            return await counting.to_one_of(hosts, unable)
    except TimeoutError:
        raise DeadlineExceeded("no host has counted the prompt's tokens", "raise the timeout") from counting.failure
    finally:
        counting.suspicion.end_turn()
