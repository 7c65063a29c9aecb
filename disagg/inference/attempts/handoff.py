"""Performs a hand-off: a prompt on a prefill host, or on both hosts, and the answer on the decode host.

A prefill host that fails before any chunk of the KV has come whole ends the attempt. After that the decode host goes on
by itself and says so: it computes the rest, or opens a second slot, for which another prefill host is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from disagg.api.events import DoneEvent, Event, LocalEvent, RefutedEvent, ShippedEvent, SlotEvent
from disagg.api.names import KV_CHUNKS
from disagg.api.requests import DecodeBody, PrefillBody, Split
from disagg.config import Host
from disagg.errors import (
    DisaggError,
    HandoffError,
    KVRefuted,
    Overloaded,
    ProtocolError,
    RequestError,
    SenderTooSlow,
    ServerSilent,
)
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import FALLBACK_WARNING, ArrivingAnswer, AttemptOutcome
from disagg.inference.attempts.caller import HostCaller, PrefillFailed, new_id
from disagg.inference.attempts.suspects import broke_off
from disagg.inference.http import host_calls
from disagg.inference.policy import SHARE


@dataclass(slots=True)
class FirstKV:
    """Decides by the phases that both hosts state whether the KV is late; passes the phases on to `reported`. limit_s:
    set when a prefill host is asked. on_shipped: called with its name when it has sent the KV. failed: its error, after
    which the decode host may have chunks to go on from."""

    reported: Callable[[str], None]
    on_shipped: Callable[[str], None]
    limit_s: float = inf
    computing_since: float | None = None
    shipped_at: float | None = None
    failed: DisaggError | None = None

    def asked(self, limit_s: float) -> None:
        """A prefill host is asked, perhaps after another one has failed."""
        self.limit_s, self.computing_since, self.shipped_at, self.failed = limit_s, None, None, None

    def prefill(self, phase: str) -> None:
        """The prefill host states this phase."""
        if self.computing_since is None and phase in ("computing the prompt", "sending KV"):
            self.computing_since = time.monotonic()
        self.reported(phase)

    def decode(self, phase: str) -> None:
        """The decode host states this phase. Raises HandoffError if the KV should have begun to arrive long ago, or
        will not, since its prefill host has failed."""
        if phase == "waiting for KV" and self.failed is not None:
            raise HandoffError(self.failed.message, self.failed.hint)
        if phase == "waiting for KV" and self._is_late(self.computing_since):
            raise HandoffError(f"no KV has arrived {self.limit_s:.0f} s after its prefill began", "run `disagg doctor`")
        if phase in ("waiting for KV", "receiving KV") and self._is_late(self.shipped_at):
            raise HandoffError(f"the KV has not arrived {self.limit_s:.0f} s after it was sent", "run `disagg doctor`")
        self.reported(phase)

    def shipped(self, name: str, shipping: asyncio.Future[ShippedEvent]) -> None:
        """A prefill host's part is over."""
        if not shipping.cancelled() and shipping.exception() is None:
            self.shipped_at = time.monotonic()
            self.on_shipped(name)

    def _is_late(self, since: float | None) -> bool:
        return since is not None and time.monotonic() - since >= self.limit_s


@dataclass(slots=True, eq=False)
class Head:
    """A prefill host that was asked for what a slot is for. order: the request to it. shipping: its answer."""

    host: Host
    slot: SlotEvent
    order: host_calls.EventCall
    shipping: asyncio.Future[ShippedEvent]

    @property
    def error(self) -> BaseException | None:
        """Why it has failed; None if it works, has sent all, or was cancelled."""
        done = self.shipping.done() and not self.shipping.cancelled()
        return self.shipping.exception() if done else None

    def may_have_sent(self, error: BaseException, *, begun: bool) -> bool:
        """Whether chunks may have come whole before it failed so. begun: it has stated that it computes."""
        refused = not self.order.written or (isinstance(error, Overloaded | RequestError) and not begun)
        return self.slot.kv_version >= KV_CHUNKS and not refused

    async def end(self) -> None:
        """It is not waited for any more."""
        self.shipping.cancel()
        await asyncio.wait((self.shipping,))
        _ = self.error  # retrieved, so that asyncio does not log it


@dataclass(slots=True)
class _HandOff:
    """One hand-off on its way. call: the request to the decode host, `decode`. failed: the names of prefill hosts.
    suspect: the process of one of them may have ended with the prompt."""

    caller: HostCaller
    attempt: Attempt
    body: DecodeBody
    answer: ArrivingAnswer
    leases: ExitStack
    call: host_calls.EventCall
    first_kv: FirstKV
    decode: Host
    head: Head | None = None
    failed: set[str] = field(default_factory=set)
    suspect: bool = False

    async def to_end(self, events: host_calls.EventStream, slot: SlotEvent, prefill: Host) -> AttemptOutcome:
        """Ask this prefill host for what the slot is for, and follow the answer."""
        answer = self.answer
        self._ask(slot, prefill)
        try:
            first = await self._first_tokens(events)
            while isinstance(first, SlotEvent | LocalEvent):
                answer.take(first)
                await self._go_on(first)
                first = await self._first_tokens(events)
            if isinstance(first, RefutedEvent):
                self._refuted(first)
                answer.note(f"{FALLBACK_WARNING}: {first.message}")
                first = await events.next()
            done = answer.take(first)
            if self.head is not None:
                answer.trace.ordered = self.head.order.written
            return await self._with_figures(done or await self._rest(events))
        finally:
            if (head := self.head) is not None:
                await head.end()
                sent = None if head.shipping.cancelled() or head.error is not None else head.shipping.result()
                if sent is not None and not self._misfit(sent):
                    answer.trace.shipped = sent

    def _ask(self, slot: SlotEvent, prefill: Host) -> None:
        order = self.caller.call(
            prefill,
            "/prefill",
            PrefillBody(
                **self.body.of_prompt | ({"standing": "suspect"} if self.suspect else {}),
                deliver=slot.kv,
                ticket=slot.ticket,
                start=slot.held_tokens,
                layers=slot.layers,
                kv_version=slot.kv_version,
                kv_wire=slot.kv_wire,
            ),
            self.leases,
            request_id=self.call.request_id,
            reported=self.first_kv.prefill,
        )
        self.first_kv.asked(order.timeouts.first_kv)
        shipping = asyncio.ensure_future(host_calls.closing_event(self.caller.http, order, ShippedEvent))
        shipping.add_done_callback(partial(self.first_kv.shipped, prefill.name))
        self.head = Head(prefill, slot, order, shipping)

    async def _first_tokens(self, events: host_calls.EventStream) -> Event:
        """The decode host's next event; PrefillFailed as soon as the KV cannot come any more, and that host has
        nothing to go on from."""
        if (head := self.head) is None:
            return await events.next()
        upcoming, shipping = asyncio.ensure_future(events.next()), head.shipping
        try:
            await asyncio.wait((upcoming, shipping), return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done() and (error := head.error) is not None:
                if not isinstance(error, DisaggError):
                    raise error
                if self.failed:  # the decode host goes on by itself
                    return await upcoming
                if head.may_have_sent(error, begun=self.first_kv.computing_since is not None):
                    self.first_kv.failed = error
                    await asyncio.wait((upcoming,), timeout=self.call.timeouts.silence)
                if not upcoming.done():
                    raise PrefillFailed(error)
            return await upcoming
        except SenderTooSlow as error:  # whatever the sender says of it
            raise PrefillFailed(error) from error
        except HandoffError as error:
            # The prefill host's own error says more than the broken connection that the decode host saw.
            await asyncio.wait((shipping,), timeout=self.call.timeouts.blame)
            cause = head.error
            raise PrefillFailed(cause if isinstance(cause, DisaggError) else error) from error
        except ServerSilent as error:
            # Of two silent hosts, the one that has sent nothing for longer: the decode host may only wait for its KV.
            shipped = shipping.done() and head.error is None
            if not shipped and head.order.last_sign <= self.call.last_sign:
                raise PrefillFailed(host_calls.silent(head.host)) from error
            raise
        finally:
            upcoming.cancel()
            await asyncio.wait((upcoming,))

    async def _go_on(self, event: SlotEvent | LocalEvent) -> None:
        """The prefill host has failed in mid-prompt. Another one is asked if the decode host opened a slot for it."""
        answer, trace, host = self.answer, self.answer.trace, None
        if (head := self.head) is not None:
            await asyncio.wait((head.shipping,), timeout=self.call.timeouts.blame)
            why = event.reason if isinstance(event, LocalEvent) else f"{head.host.name} has failed in mid-prompt"
            error = head.error if isinstance(head.error, DisaggError) else HandoffError(why, "run `disagg status`")
            await head.end()
            self.failed.add(head.host.name)
            self.suspect = self.suspect or broke_off(error)
            self.caller.updates.head_failed(head.host.name, error)
            place = f"after {event.held_tokens} of {event.prompt_tokens} prompt tokens"
            if isinstance(event, LocalEvent) and self.caller.on_kv_failure == "fail":
                raise PrefillFailed(error)
            answer.note(f"{head.host.name} failed {place} ({error.message}): the prompt goes on from there")
        self.head, self.first_kv.failed = None, None
        if isinstance(event, SlotEvent):
            host = self.caller.next_head(event, self.failed)
            if host is not None and self.caller.updates.head_asked(host):
                now = time.monotonic()
                trace.replaced_s, trace.slot = trace.replaced_s + now - trace.slot, now
                trace.attempt = replace(self.attempt, prefill=host)
                self._ask(event, host)

    def _refuted(self, event: RefutedEvent) -> None:
        """The decode host computes the prompt itself, because the KV was wrong. Raises what ends the attempt, if it is
        to end: that host is to blame itself, or no fallback is wanted."""
        error = KVRefuted(event.message, event.hint)
        if self.caller.updates.refuted(event, self.caller.elsewhere(self.decode)):
            raise error
        if self.caller.on_kv_failure == "fail":
            raise PrefillFailed(error)

    async def _rest(self, events: host_calls.EventStream) -> DoneEvent:
        """The rest of an answer. PrefillFailed if the decode host finds only now that the KV was wrong."""
        try:
            return await events.to_end(self.answer.take)
        except KVRefuted as error:
            raise PrefillFailed(error) from error

    async def _with_figures(self, done: DoneEvent) -> AttemptOutcome:
        """The outcome with the prefill host's figures. Missing ones are a warning, not a failure: they are not waited
        for until the deadline, at which a complete answer would fail."""
        if (head := self.head) is None:
            return AttemptOutcome(done)
        timeouts, name = self.caller.timeouts, head.host.name
        await asyncio.wait((head.shipping,), timeout=min(timeouts.figures, SHARE * self.caller.left_s))
        if not head.shipping.done() or (error := head.error) is not None:
            reason = str(error) if head.shipping.done() else "it did not answer in time"
            return AttemptOutcome(done, warnings=(f"the figures of {name} are missing: {reason}",))
        shipped = head.shipping.result()
        if reason := self._misfit(shipped):
            return AttemptOutcome(done, warnings=(f"the figures of {name} are missing: {reason}",))
        if shipped.exposed_transfer_s < timeouts.slow_transfer:
            return AttemptOutcome(done, shipped)
        slow = f"Slow KV transfer from {name}: the request waited {shipped.exposed_transfer_s:.1f} s for it"
        return AttemptOutcome(done, shipped, (slow,))

    def _misfit(self, shipped: ShippedEvent) -> str:
        """Why these figures cannot be; empty if they can."""
        return self.answer.bounds.shipped(shipped) if self.answer.bounds is not None else ""


async def hand_off(
    caller: HostCaller, attempt: Attempt, body: DecodeBody, answer: ArrivingAnswer, leases: ExitStack
) -> AttemptOutcome:
    """The prompt on one host or on two, the answer on the decode host; all on that alone if it finds that faster."""
    decode, prefill = attempt.decode, attempt.prefill
    assert decode is not None and prefill is not None, "a hand-off has two hosts"
    first_kv = FirstKV(answer.reported, caller.updates.shipped)
    call = caller.call(decode, "/decode", body, leases, request_id=new_id(answer), reported=first_kv.decode)
    async with host_calls.events(caller.http, call) as events:
        slot = await events.next()
        answer.trace.requested, answer.trace.slot = call.written, time.monotonic()
        done = answer.take(slot)
        if unmet := _unmet(body.split, slot):
            answer.note(unmet)
        if isinstance(slot, LocalEvent):
            caller.updates.not_asked(prefill.name)
            return AttemptOutcome(await events.to_end(answer.take))
        if done is not None:  # the answer was complete when its host failed
            return AttemptOutcome(done)
        if not isinstance(slot, SlotEvent):
            raise ProtocolError(f"{decode.name} opened its answer with {slot.event!r} instead of a slot")
        made = _HandOff(caller, attempt, body, answer, leases, call, first_kv, decode)
        return await made.to_end(events, slot, prefill)


def _unmet(wanted: Split, event: Event) -> str:
    """What the caller is told if its prompt is not divided as it asked for; empty if it is."""
    if not isinstance(wanted, int) or wanted == 0 or not isinstance(event, SlotEvent | LocalEvent):
        return ""
    if isinstance(event, SlotEvent) and event.layers is not None:
        return ""
    if event.held_tokens >= event.prompt_tokens - 1:  # there was nothing to divide
        return ""
    whole = isinstance(event, SlotEvent) and event.reason == f"split = {wanted}"  # more than the model has
    return "" if whole else f"the prompt was not divided: {event.reason or 'the decode host divides none'}"
