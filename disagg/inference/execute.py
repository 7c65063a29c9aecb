"""Runs one request: performs the attempts of the retry policy, one after the other, until one gives the answer.

Everything here is a plain coroutine. Chunks leave by a callback as soon as their event has been read from the socket,
so that their times are those of arrival, and a slow caller does not delay reading.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
import msgspec

from disagg.api.events import DoneEvent, Event, ShippedEvent, SlotEvent, TokenLogprob, TokensEvent
from disagg.api.requests import DecodeBody, GenerateBody, PrefillBody
from disagg.config import Host
from disagg.errors import DeadlineExceeded, DisaggError, HandoffError, Overloaded, ProtocolError, ServerUnavailable
from disagg.inference import http as calls
from disagg.inference.attempts import DEFAULT_POLICY, Attempt, Failure, RetryPolicy, attempts, remaining
from disagg.inference.measure import Trace, metrics
from disagg.inference.route import Route
from disagg.inference.types import Chunk, Completion

FALLBACK_WARNING = "Using fallback mode - slower performance"
SIMULATED_WARNING = "simulated: no model ran, the times are predicted and the text is noise"
FIGURES_S = 5.0  # to wait for the prefill host's figures after the answer is complete

Deliver = Callable[[Chunk], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to run. called: time.monotonic() when the caller asked for the answer."""

    route: Route
    body: GenerateBody
    called: float
    policy: RetryPolicy = DEFAULT_POLICY


class PrefillFailed(Exception):
    """The KV does not reach the decode host because of `error`. Never leaves this module."""

    def __init__(self, error: DisaggError) -> None:
        self.error = error


class AttemptOutcome(NamedTuple):
    """How a successful attempt ended. `shipped`: the prefill host's figures of a hand-off, if they arrived."""

    done: DoneEvent
    shipped: ShippedEvent | None = None
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _ArrivingAnswer:
    """One attempt's answer while it arrives."""

    trace: Trace
    deliver: Deliver
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)

    @property
    def started(self) -> bool:
        return self.trace.first_token > 0

    async def read(self, events: AsyncIterator[Event]) -> DoneEvent:
        """Take events to the end of the answer."""
        async for event in events:
            if (done := self.take(event)) is not None:
                return done
        raise AssertionError("events() raises if a stream ends without its closing event")

    def take(self, event: Event) -> DoneEvent | None:
        """Note one event's tokens and deliver them; returns the event if it is the last one."""
        if isinstance(event, TokensEvent):
            now = time.monotonic()
            self.trace.first_token = self.trace.first_token or now
            self.trace.last_token = now
            self.texts.append(event.text)
            self.tokens.extend(event.tokens)
            self.deliver(Chunk(event.text, event.tokens, now))
        return event if isinstance(event, DoneEvent) else None

    def completion(self, outcome: AttemptOutcome) -> Completion:
        done = outcome.done
        warnings = list(outcome.warnings)
        if done.fallback:
            warnings.append(f"{FALLBACK_WARNING}: {done.fallback}")
        if done.simulated:
            warnings.append(SIMULATED_WARNING)
        figures = metrics(self.trace, done, outcome.shipped)
        return Completion("".join(self.texts), tuple(self.tokens), done.finish_reason, figures, tuple(warnings))


async def run(http: httpx.AsyncClient, request: Request, deliver: Deliver) -> Completion:
    """The whole answer; `deliver` gets each chunk when it arrives.

    Ends by the request's deadline. Raises the DisaggError of the last attempt.
    """
    try:
        async with asyncio.timeout(request.body.deadline_s):
            return await _first_success(http, request, deliver)
    except TimeoutError:
        raise DeadlineExceeded(
            f"no full answer within {request.body.deadline_s:g} s", "raise the timeout, or see `disagg status`"
        ) from None


async def _first_success(http: httpx.AsyncClient, request: Request, deliver: Deliver) -> Completion:
    failures: list[Failure] = []
    began = request.called
    for attempt in remaining(attempts(request.route, request.policy), failures):
        log.debug("attempt: %s", attempt)
        answer = _ArrivingAnswer(Trace(attempt, request.route.model, request.called, began), deliver)
        try:
            return answer.completion(await _perform(http, attempt, request.body, answer, failures))
        except PrefillFailed as failed:
            failure = Failure(attempt, "prefill", failed.error)
        except DisaggError as error:
            failure = Failure(attempt, "decode" if attempt.decode else "prefill", error)
        calls.require_open(http)  # closing the client under a request looks like a lost connection
        if not failure.retryable:
            raise failure.error
        failures.append(failure)
        if answer.started:
            break
        began = time.monotonic()
    raise _final_error(failures)


async def _perform(
    http: httpx.AsyncClient, attempt: Attempt, body: GenerateBody, answer: _ArrivingAnswer, failures: Sequence[Failure]
) -> AttemptOutcome:
    if attempt.decode and attempt.prefill:
        return await _hand_off(http, attempt.decode, attempt.prefill, body, answer)
    host = attempt.decode or attempt.prefill
    assert host is not None, "an attempt names a host"
    done = await _generate(http, host, body, answer)
    reasons = [failure.error for failure in failures if failure.side == "prefill"]
    if attempt.method != "fallback" or not reasons:
        return AttemptOutcome(done)
    return AttemptOutcome(done, warnings=(f"{FALLBACK_WARNING}: {reasons[-1]}",))


async def _generate(http: httpx.AsyncClient, host: Host, body: GenerateBody, answer: _ArrivingAnswer) -> DoneEvent:
    """The whole request on one host."""
    call = calls.Call(host, "/generate", body, _new_request_id())
    async with calls.events(http, call) as events:
        answer.trace.requested = call.written
        return await answer.read(events)


async def _hand_off(
    http: httpx.AsyncClient, decode: Host, prefill: Host, body: GenerateBody, answer: _ArrivingAnswer
) -> AttemptOutcome:
    """The prompt on one host, the answer on another. Raises PrefillFailed if the KV does not arrive."""
    call = calls.Call(decode, "/decode", DecodeBody(**msgspec.structs.asdict(body)), _new_request_id())
    async with calls.events(http, call) as events:
        slot = await anext(events)
        if not isinstance(slot, SlotEvent):
            raise ProtocolError(f"{decode.name} opened its answer with {slot.event!r} instead of a slot")
        answer.trace.requested, answer.trace.slot = call.written, time.monotonic()
        order = calls.Call(prefill, "/prefill", _prefill_body(body, slot), call.request_id, calls.PREFILL_SILENCE_S)
        shipping = asyncio.ensure_future(calls.closing_event(http, order, ShippedEvent))
        try:
            done = answer.take(await _first_tokens(events, shipping))
            answer.trace.ordered = order.written
            done = done or await answer.read(events)
            return AttemptOutcome(done) if done.fallback else await _with_figures(done, shipping, prefill)
        finally:
            shipping.cancel()
            await asyncio.wait((shipping,))
            _exception(shipping)  # retrieved, so that asyncio does not log it


def _prefill_body(body: GenerateBody, slot: SlotEvent) -> PrefillBody:
    return PrefillBody(
        model=body.model,
        prompt=body.prompt,
        messages=body.messages,
        tokens=body.tokens,
        deadline_s=body.deadline_s,
        deliver=slot.kv,
        ticket=slot.ticket,
    )


async def _first_tokens(events: AsyncIterator[Event], shipping: asyncio.Future[ShippedEvent]) -> Event:
    """The decode host's first event after its slot; PrefillFailed as soon as the KV cannot come any more."""
    upcoming = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait((upcoming, shipping), return_when=asyncio.FIRST_COMPLETED)
        if not upcoming.done() and (error := _exception(shipping)) is not None:
            raise PrefillFailed(error) if isinstance(error, DisaggError) else error
        return await upcoming
    except HandoffError as error:
        raise PrefillFailed(error) from error
    finally:
        upcoming.cancel()
        await asyncio.wait((upcoming,))


async def _with_figures(done: DoneEvent, shipping: asyncio.Future[ShippedEvent], prefill: Host) -> AttemptOutcome:
    """The outcome with the prefill host's figures. Missing ones are a warning, not a failure."""
    await asyncio.wait((shipping,), timeout=FIGURES_S)
    if shipping.done() and (error := _exception(shipping)) is None:
        return AttemptOutcome(done, shipping.result())
    reason = str(error) if shipping.done() else "it did not answer in time"
    return AttemptOutcome(done, warnings=(f"the figures of {prefill.name} are missing: {reason}",))


def _exception(future: asyncio.Future[ShippedEvent]) -> BaseException | None:
    """The exception of a future that has failed; None if it runs, succeeded or was cancelled."""
    return future.exception() if future.done() and not future.cancelled() else None


def _final_error(failures: Sequence[Failure]) -> DisaggError:
    """The one error to raise once no attempt is left."""
    last = failures[-1].error
    if isinstance(last, Overloaded):
        return last
    messages = "; ".join(failure.error.message for failure in failures if failure.side == "decode")
    hint = last.hint or "run `disagg status`"
    return ServerUnavailable(f"Decode server unavailable - request failed: {messages}", hint)


def _new_request_id() -> str:
    return secrets.token_hex(8)
