"""A question about a prompt that any one host of its model can answer: they are asked in turn until one does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec.structs import replace

from disagg.api.requests import PromptBody
from disagg.config import Host
from disagg.errors import CapabilityMissing, DisaggError, KVMemoryExceeded, Overloaded, RequestError
from disagg.inference.attempts.execute import Driver, GenerationRequest
from disagg.inference.attempts.suspects import Suspicion, broke_off

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
            left_s = self.request.called + self.body.deadline_s - time.monotonic()
            body = replace(self.body, standing=suspicion.standing)
            asking, boot_id = Asking(host, body, left_s, host is hosts[-1]), self.driver.view.of(host.name).boot_id
            try:
                return await self.ask(asking)
            except DisaggError as error:
                if isinstance(error, RequestError) and not isinstance(error, KVMemoryExceeded):
                    raise
                if self.failure is None or not isinstance(error, CapabilityMissing):
                    self.failure = error
                busy, failed = error if self.waits and isinstance(error, Overloaded) else busy, error
            if asking.sent.is_set() and broke_off(failed):
                await suspicion.broke_off([(host, boot_id)], failed)
                await suspicion.take_turn(bool)
        raise busy or self.failure or unable
