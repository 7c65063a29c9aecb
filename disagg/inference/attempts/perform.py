"""Performs one attempt: a hand-off between two hosts, or the whole request on one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf

import msgspec

from disagg.api.events import DoneEvent, Event, LocalEvent, RefutedEvent, ShippedEvent, SlotEvent
from disagg.api.requests import DecodeBody, GenerateBody, PrefillBody
from disagg.config import Host
from disagg.errors import DisaggError, HandoffError, KVRefuted, ProtocolError, SenderTooSlow, ServerSilent
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import FALLBACK_WARNING, ArrivingAnswer, AttemptOutcome
from disagg.inference.attempts.view_updates import ViewUpdates
from disagg.inference.hosts.background import Heartbeat
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import SHARE, OnKVFailure, QueueExit, Timeouts, longest_wait_s
from disagg.whole.answers import WholeAnswer


@dataclass(frozen=True, slots=True)
class HostCaller:
    """How the hosts of one attempt are called. deadline: the request's, by time.monotonic(). elsewhere: whether
    another host of this one's role gets requests now. claim: takes a free place for the request
    at another host of this one's role, False if there is none. on_kv_failure: what follows if no prefill host delivers.
    sent: the last call of each host, by its name."""

    http: Connections
    heartbeat: Heartbeat
    timeouts: Timeouts
    deadline: float
    elsewhere: Callable[[Host], bool]
    claim: Callable[[Host], bool]
    updates: ViewUpdates
    on_kv_failure: OnKVFailure
    sent: dict[str, host_calls.EventCall] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def waits(self, host: Host) -> Timeouts:
        """The waits for this host from now on."""
        return self.timeouts.within(self.left_s) if self.elsewhere(host) else self.timeouts

    def call(
        self,
        host: Host,
        path: str,
        body: msgspec.Struct,
        leases: ExitStack,
        *,
        request_id: str,
        reported: Callable[[str], None],
    ) -> host_calls.EventCall:
        """A POST whose lease is extended until `leases` is closed. reported: gets the phases that the host states."""
        leases.enter_context(self.heartbeat.lease(host, request_id))
        queue_exit = QueueExit(longest_wait_s(self.left_s), partial(self.claim, host))
        call = host_calls.EventCall(
            host, path, body, request_id, self.waits(host), reported=reported, queue_exit=queue_exit
        )
        self.sent[host.name] = call
        return call


@dataclass(slots=True)
class FirstKV:
    """Decides by the phases that both hosts state whether the KV is late; passes the phases on to `reported`. limit_s:
    set when the prefill host is asked. on_shipped: called when it has sent the KV."""

    reported: Callable[[str], None]
    on_shipped: Callable[[], None]
    limit_s: float = inf
    computing_since: float | None = None
    shipped_at: float | None = None

    def prefill(self, phase: str) -> None:
        """The prefill host states this phase."""
        if self.computing_since is None and phase in ("computing the prompt", "sending KV"):
            self.computing_since = time.monotonic()
        self.reported(phase)

    def decode(self, phase: str) -> None:
        """The decode host states this phase. Raises HandoffError if the KV should have begun to arrive long ago."""
        if phase == "waiting for KV" and self._is_late(self.computing_since):
            raise HandoffError(f"no KV has arrived {self.limit_s:.0f} s after its prefill began", "run `disagg doctor`")
        if phase in ("waiting for KV", "receiving KV") and self._is_late(self.shipped_at):
            raise HandoffError(f"the KV has not arrived {self.limit_s:.0f} s after it was sent", "run `disagg doctor`")
        self.reported(phase)

    def shipped(self, shipping: asyncio.Future[ShippedEvent]) -> None:
        """The prefill host's part is over."""
        if not shipping.cancelled() and shipping.exception() is None:
            self.shipped_at = time.monotonic()
            self.on_shipped()

    def _is_late(self, since: float | None) -> bool:
        return since is not None and time.monotonic() - since >= self.limit_s


class PrefillFailed(Exception):
    """The KV does not reach the decode host because of `error`. Never leaves `inference`."""

    def __init__(self, error: DisaggError) -> None:
        self.error = error


async def perform(
    caller: HostCaller, attempt: Attempt, body: GenerateBody | DecodeBody, answer: ArrivingAnswer
) -> AttemptOutcome:
    """The rest of the answer; a hand-off has a DecodeBody. Raises PrefillFailed, or the DisaggError of the answering
    host."""
    with ExitStack() as leases:
        if attempt.prefill and isinstance(body, DecodeBody):
            return await _hand_off(caller, attempt, body, answer, leases)
        call = caller.call(
            attempt.answering,
            "/generate",
            body,
            leases,
            request_id=_new_id(answer),
            reported=answer.reported,
        )
        async with host_calls.events(caller.http, call) as events:
            answer.trace.requested = call.written
            return AttemptOutcome(await events.to_end(answer.take))


async def perform_whole(http: Connections, call: host_calls.WholeCall, answer: ArrivingAnswer) -> AttemptOutcome:
    """The whole answer of a whole-request host. Raises the host's error."""
    arriving = WholeAnswer(call.host.name, one_call=call.request.body.get("parallel_tool_calls") is False)
    begun = False

    def opened() -> None:
        answer.trace.requested = call.written
        answer.enter("prefill")

    def take(piece: bytes) -> bool:
        nonlocal begun
        if (event := arriving.take(piece)) is not None:
            begun = True
            answer.take(event)
        return begun

    await host_calls.whole_answer(http, call, opened, take)
    done = arriving.done()
    answer.take(done)
    return AttemptOutcome(done, warnings=tuple(arriving.warnings))


async def _hand_off(
    caller: HostCaller, attempt: Attempt, body: DecodeBody, answer: ArrivingAnswer, leases: ExitStack
) -> AttemptOutcome:
    """The prompt on one host, the answer on another; on the decode host alone if it finds that faster."""
    decode, prefill = attempt.decode, attempt.prefill
    assert decode is not None and prefill is not None, "a hand-off has two hosts"
    first_kv = FirstKV(answer.reported, partial(caller.updates.shipped, prefill.name))
    call = caller.call(decode, "/decode", body, leases, request_id=_new_id(answer), reported=first_kv.decode)
    async with host_calls.events(caller.http, call) as events:
        slot = await events.next()
        answer.trace.requested, answer.trace.slot = call.written, time.monotonic()
        done = answer.take(slot)
        if isinstance(slot, LocalEvent):
            caller.updates.not_asked(prefill.name)
            return AttemptOutcome(await events.to_end(answer.take))
        if done is not None:  # the answer was complete when its host failed
            return AttemptOutcome(done)
        if not isinstance(slot, SlotEvent):
            raise ProtocolError(f"{decode.name} opened its answer with {slot.event!r} instead of a slot")
        order = caller.call(
            prefill,
            "/prefill",
            PrefillBody(**body.of_prompt, deliver=slot.kv, ticket=slot.ticket, start=slot.held_tokens),
            leases,
            request_id=call.request_id,
            reported=first_kv.prefill,
        )
        first_kv.limit_s = order.timeouts.first_kv
        shipping = asyncio.ensure_future(host_calls.closing_event(caller.http, order, ShippedEvent))
        shipping.add_done_callback(first_kv.shipped)
        try:
            first = await _first_tokens(events, shipping, call, order)
            if isinstance(first, RefutedEvent):
                _refuted(first, caller, decode)
                answer.note(f"{FALLBACK_WARNING}: {first.message}")
                first = await events.next()
            done = answer.take(first)
            answer.trace.ordered = order.written
            done = done or await _rest(answer, events)
            return await _with_figures(done, shipping, prefill, caller, answer)
        finally:
            shipping.cancel()
            await asyncio.wait((shipping,))
            error = _exception(shipping)  # retrieved, so that asyncio does not log it
            if error is None and not shipping.cancelled() and not _misfit(shipping.result(), answer):
                answer.trace.shipped = shipping.result()


def _refuted(event: RefutedEvent, caller: HostCaller, decode: Host) -> None:
    """The decode host computes the prompt itself, because the KV was wrong. Raises what ends the attempt, if it is to
    end: that host is to blame itself, or no fallback is wanted."""
    error = KVRefuted(event.message, event.hint)
    if caller.updates.refuted(event, caller.elsewhere(decode)):
        raise error
    if caller.on_kv_failure == "fail":
        raise PrefillFailed(error)


async def _rest(answer: ArrivingAnswer, events: host_calls.EventStream) -> DoneEvent:
    """The rest of an answer. PrefillFailed if the decode host finds only now that the KV was wrong."""
    try:
        return await events.to_end(answer.take)
    except KVRefuted as error:
        raise PrefillFailed(error) from error


async def _first_tokens(
    events: host_calls.EventStream,
    shipping: asyncio.Future[ShippedEvent],
    call: host_calls.EventCall,
    order: host_calls.EventCall,
) -> Event:
    """The decode host's first event after its slot; PrefillFailed as soon as the KV cannot come any more.

    call, order: the requests to the decode and the prefill host.
    """
    upcoming = asyncio.ensure_future(events.next())
    try:
        await asyncio.wait((upcoming, shipping), return_when=asyncio.FIRST_COMPLETED)
        if not upcoming.done() and (error := _exception(shipping)) is not None:
            raise PrefillFailed(error) if isinstance(error, DisaggError) else error
        return await upcoming
    except SenderTooSlow as error:  # whatever the sender says of it
        raise PrefillFailed(error) from error
    except HandoffError as error:
        # The prefill host's own error says more than the broken connection that the decode host saw.
        await asyncio.wait((shipping,), timeout=call.timeouts.blame)
        cause = _exception(shipping)
        raise PrefillFailed(cause if isinstance(cause, DisaggError) else error) from error
    except ServerSilent as error:
        # Of two silent hosts, the one that has sent nothing for longer: the decode host may only wait for its KV.
        shipped = shipping.done() and _exception(shipping) is None
        if not shipped and order.last_sign <= call.last_sign:
            raise PrefillFailed(host_calls.silent(order.host)) from error
        raise
    finally:
        upcoming.cancel()
        await asyncio.wait((upcoming,))


async def _with_figures(
    done: DoneEvent,
    shipping: asyncio.Future[ShippedEvent],
    prefill: Host,
    caller: HostCaller,
    answer: ArrivingAnswer,
) -> AttemptOutcome:
    """The outcome with the prefill host's figures. Missing ones are a warning, not a failure: they are not waited for
    until the deadline, at which a complete answer would fail."""
    timeouts = caller.timeouts
    await asyncio.wait((shipping,), timeout=min(timeouts.figures, SHARE * caller.left_s))
    if not shipping.done() or (error := _exception(shipping)) is not None:
        reason = str(error) if shipping.done() else "it did not answer in time"
        return AttemptOutcome(done, warnings=(f"the figures of {prefill.name} are missing: {reason}",))
    shipped = shipping.result()
    if reason := _misfit(shipped, answer):
        return AttemptOutcome(done, warnings=(f"the figures of {prefill.name} are missing: {reason}",))
    if shipped.exposed_transfer_s < timeouts.slow_transfer:
        return AttemptOutcome(done, shipped)
    slow = f"Slow KV transfer from {prefill.name}: the request waited {shipped.exposed_transfer_s:.1f} s for it"
    return AttemptOutcome(done, shipped, (slow,))


def _misfit(shipped: ShippedEvent, answer: ArrivingAnswer) -> str:
    """Why these figures cannot be; empty if they can."""
    return answer.bounds.shipped(shipped) if answer.bounds is not None else ""


def _exception(future: asyncio.Future[ShippedEvent]) -> BaseException | None:
    """The exception of a future that has failed; None if it runs, succeeded or was cancelled."""
    return future.exception() if future.done() and not future.cancelled() else None


def _new_id(answer: ArrivingAnswer) -> str:
    """The id of one attempt, which is unique on every host."""
    return ".".join(filter(None, (answer.request_id, secrets.token_hex(8))))
