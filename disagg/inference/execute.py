"""One request from start to end: hand-off, retry, fallback, and the failures that nobody may swallow.

prefill fails -> one retry, on another prefill host if there is one -> the decode host computes the prompt itself.
decode fails before its first token -> another host that serves the model. Anything else is one clear error.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from disagg.api.events import TokenLogprob, TokensEvent
from disagg.config import Host
from disagg.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    HandoffError,
    Overloaded,
    ProtocolError,
    RequestError,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference import http as api
from disagg.inference.measure import Trace, metrics
from disagg.inference.route import Route
from disagg.inference.types import Chunk, Completion

FALLBACK_WARNING = "Using fallback mode - slower performance"
SIMULATED_WARNING = "simulated: no model ran, the times are predicted and the text is noise"
PREFILL_ATTEMPTS = 2
ACCOUNT_S = 5.0  # for the prefill host's figures, once the answer is complete

Alone = Literal["decode", "prefill"]
Answer = AsyncGenerator[Chunk | Completion, None]


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it goes to the servers. `prompt`: {"prompt"|"messages"|"tokens": ...}."""

    prompt: Mapping[str, Any]
    sampling: Mapping[str, Any]
    timeout: float

    def body(self, model: str, *, sampling: bool = True) -> dict[str, Any]:
        extra = {"sampling": dict(self.sampling)} if sampling else {}
        return {"model": model, "deadline_s": self.timeout, **self.prompt, **extra}


@dataclass(slots=True)
class _Clock:
    """time.monotonic() when the request was sent, and when the attempt under way began."""

    sent: float
    began: float

    def attempt_failed(self) -> None:
        self.began = time.monotonic()


class _PrefillFailed(Exception):
    """Inner signal: the KV did not get to the decode host, because of `error`."""

    def __init__(self, error: DisaggError) -> None:
        self.error = error


async def run(http: httpx.AsyncClient, route: Route, request: Request, alone: Alone | None) -> Answer:
    """Chunks as they come, the Completion last. Ends by the request's deadline."""
    now = time.monotonic()
    clock = _Clock(now, now)
    if alone == "prefill":
        answer = _alone_on_prefill(http, route, request, clock)
    elif alone == "decode" or not route.prefill:
        answer = _on_some_decode_host(http, route, request, clock, handoff=False)
    else:
        answer = _on_some_decode_host(http, route, request, clock, handoff=True)
    deadline = asyncio.get_running_loop().time() + request.timeout
    async with aclosing(answer):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(answer)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no full answer within {request.timeout:g} s", "raise the timeout, or see `disagg status`"
                ) from None
            yield item


async def _on_some_decode_host(
    http: httpx.AsyncClient, route: Route, request: Request, clock: _Clock, *, handoff: bool
) -> Answer:
    """Try the route's decode hosts in turn until one has given its first token."""
    failures: list[str] = []
    for host in route.decode:
        started = False
        answer = (_with_handoff if handoff else _alone_on_decode)(http, route, host, request, clock)
        try:
            async with aclosing(answer):
                async for item in answer:
                    started = True
                    yield item
                return
        except (ServerUnavailable, Overloaded) as error:
            if started:
                raise ServerUnavailable(
                    f"Decode server unavailable - request failed: {error.message}", error.hint
                ) from error
            failures.append(error.message)
            last = error
            clock.attempt_failed()
    if isinstance(last, Overloaded):
        raise last
    raise ServerUnavailable(f"Decode server unavailable - request failed: {'; '.join(failures)}", "run `disagg status`")


async def _with_handoff(http: httpx.AsyncClient, route: Route, host: Host, request: Request, clock: _Clock) -> Answer:
    prefills = (route.prefill * PREFILL_ATTEMPTS)[:PREFILL_ATTEMPTS]
    reason = ""
    silent: set[str] = set()  # not asked again: it would cost the same wait once more
    for prefill in prefills:
        if prefill.name in silent:
            continue
        trace = Trace("disaggregated", route.model, clock.sent, clock.began, prefill.name, host.name)
        answer = _handoff(http, host, prefill, request, trace)
        try:
            async with aclosing(answer):
                async for item in answer:
                    yield item
                return
        except _PrefillFailed as failed:
            reason = str(failed.error)
            clock.attempt_failed()
            if isinstance(failed.error, ServerSilent):
                silent.add(prefill.name)
    trace = Trace("fallback", route.model, clock.sent, clock.began, None, host.name)
    warning = f"{FALLBACK_WARNING}: {reason}"
    async with aclosing(_generate(http, host, request, trace, warnings=(warning,))) as answer:
        async for item in answer:
            yield item


def _alone_on_decode(http: httpx.AsyncClient, route: Route, host: Host, request: Request, clock: _Clock) -> Answer:
    return _generate(http, host, request, Trace("decode-alone", route.model, clock.sent, clock.began, None, host.name))


async def _alone_on_prefill(http: httpx.AsyncClient, route: Route, request: Request, clock: _Clock) -> Answer:
    if not route.prefill:
        raise ServerUnavailable(f"no prefill host serves {route.model}", "add one to hosts.toml")
    host = route.prefill[0]
    answer = _generate(
        http, host, request, Trace("prefill-alone", route.model, clock.sent, clock.began, host.name, None)
    )
    async with aclosing(answer):
        async for item in answer:
            yield item


async def _generate(
    http: httpx.AsyncClient, host: Host, request: Request, trace: Trace, warnings: tuple[str, ...] = ()
) -> Answer:
    """The whole request on one host."""
    body = request.body(trace.model)
    async with (
        api.events(http, host, "/generate", body, request_id=_new_id()) as stream,
        aclosing(_answer(stream, trace, warnings)) as answer,
    ):
        async for item in answer:
            yield item


async def _handoff(http: httpx.AsyncClient, decode: Host, prefill: Host, request: Request, trace: Trace) -> Answer:
    request_id = _new_id()
    body = request.body(trace.model)
    async with api.events(http, decode, "/decode", body, request_id=request_id) as stream:
        name, slot = await anext(stream)
        if name != "slot":
            raise ProtocolError(f"{decode.name} opened its answer with {name!r} instead of a slot")
        trace.slot = slot
        order = {
            **request.body(trace.model, sampling=False),
            "deliver": slot["kv"],
            "ticket": slot["ticket"],
        }
        shipping = asyncio.ensure_future(api.closing_event(http, prefill, "/prefill", order, request_id=request_id))
        try:
            async with aclosing(_answer(_guarded(stream, shipping), trace, shipping=shipping)) as answer:
                async for item in answer:
                    yield item
        finally:
            shipping.cancel()
            await asyncio.wait((shipping,))


async def _guarded(
    stream: AsyncGenerator[api.Event, None], shipping: asyncio.Future[dict[str, Any]]
) -> AsyncGenerator[api.Event, None]:
    """The decode host's events; _PrefillFailed as soon as the KV cannot come any more."""
    upcoming = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.wait((upcoming, shipping), return_when=asyncio.FIRST_COMPLETED)
        if not upcoming.done() and _failure(shipping) is None:
            await asyncio.wait((upcoming,))
        if not upcoming.done():
            raise _PrefillFailed(_retryable(_failure(shipping)))
        try:
            first = upcoming.result()
        except HandoffError as error:
            raise _PrefillFailed(error) from error
    finally:
        upcoming.cancel()
        await asyncio.wait((upcoming,))
    yield first
    async for event in stream:
        yield event


def _failure(shipping: asyncio.Future[dict[str, Any]]) -> BaseException | None:
    return shipping.exception() if shipping.done() else None


def _retryable(error: BaseException | None) -> DisaggError:
    """The failure to retry after; re-raises what a retry cannot change."""
    if not isinstance(error, DisaggError) or isinstance(error, RequestError | Cancelled):
        raise error or AssertionError("no failure")
    return error


async def _answer(
    stream: AsyncGenerator[api.Event, None],
    trace: Trace,
    warnings: tuple[str, ...] = (),
    shipping: asyncio.Future[dict[str, Any]] | None = None,
) -> Answer:
    texts: list[str] = []
    tokens: list[TokenLogprob] = []
    async for name, data in stream:
        if name == "tokens":
            trace.saw_tokens(time.monotonic())
            came = TokensEvent.received(data, trace.decode_server or trace.prefill_server or "")
            texts.append(came.text)
            tokens.extend(came.tokens)
            yield Chunk(came.text, came.tokens)
        elif name == "done":
            trace.done = data
            break
    done = trace.done
    if done.get("fallback"):
        trace.method = "fallback"
        warnings = (*warnings, f"{FALLBACK_WARNING}: {done['fallback']}")
    elif shipping is not None:
        warnings = (*warnings, *await _settle_account(shipping, trace))
    if done.get("simulated"):
        warnings = (*warnings, SIMULATED_WARNING)
    yield Completion("".join(texts), tuple(tokens), done["finish_reason"], metrics(trace), warnings)


async def _settle_account(shipping: asyncio.Future[dict[str, Any]], trace: Trace) -> tuple[str, ...]:
    """Take the prefill host's figures; an answer that is complete is not lost because they are."""
    await asyncio.wait((shipping,), timeout=ACCOUNT_S)
    if shipping.done() and shipping.exception() is None:
        trace.shipment = shipping.result()
        return ()
    reason = str(shipping.exception()) if shipping.done() else "it did not answer in time"
    return (f"the figures of {trace.prefill_server} are missing: {reason}",)


def _new_id() -> str:
    return secrets.token_hex(8)
