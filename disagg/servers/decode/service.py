"""The decode server: receives a prompt's KV and generates the answer from it.

POST /decode opens a slot (one-time ticket, KV address) and streams once the KV is here; if the KV is wrong, and in POST
/generate, the prompt is computed on this host. However a request ends, its ticket, its KV and its place in the batch
are released.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from disagg import logs
from disagg.api.events import DoneEvent, Event, LocalEvent, RefutedEvent, ScoredEvent, TokensEvent
from disagg.api.requests import DecodeBody, GenerateBody, KVAddress, ScoreBody
from disagg.api.sampling import Sampling
from disagg.config import Fleet, Host
from disagg.engines.base import ONE_TOKEN, DecodeRequest, HeldKV
from disagg.engines.decoding import DecodeEngine
from disagg.errors import KVRefuted, ModelError
from disagg.kv.arena import Arenas
from disagg.kv.receive import KVServer
from disagg.kv.receive.tickets import Tickets
from disagg.servers.decode.audits import AuditOrder, Audits, Fading
from disagg.servers.decode.handoff import Slots, SlotWaits, meanwhile
from disagg.servers.decode.memory import KVMemory
from disagg.servers.decode.planner import Planner
from disagg.servers.decode.prompt_kv import PromptKV, wrong
from disagg.servers.decode.spans import SPEED_WEIGHT
from disagg.servers.host.admission import Admission
from disagg.servers.host.feed import StepTokens, TokenBridge, TokenFeed
from disagg.servers.host.health import TEST_LIMIT_S
from disagg.servers.host.report import Figures
from disagg.servers.host.request import ActiveRequest, Caller
from disagg.servers.host.service import Service, ServiceCall
from disagg.servers.host.work import on_daemon_thread
from disagg.servers.output.answer import GrowingAnswer, begin_answer, constraint_of, rest_of
from disagg.servers.output.scores import PromptScores

KEEP_SHARE = 4
"""One part in so many of max_kv_bytes may lie idle, for later transfers: fresh memory costs more than a transfer."""


class DecodeService(Service[DecodeEngine]):
    """Serves POST /decode, /generate and /score with one DecodeEngine and one KV listener."""

    role = "decode"

    def __init__(
        self,
        fleet: Fleet,
        host: Host,
        make_engine: Callable[[], DecodeEngine],
        waits: SlotWaits = SlotWaits(),  # noqa: B008 - frozen
    ) -> None:
        options = host.engine
        super().__init__(fleet, host, Admission(options.max_batch, host.queue_size), make_engine)
        assert host.kv_port is not None, "config requires kv_port on decode hosts"
        self._kv_address = KVAddress(host.kv_address, host.kv_port)
        self._bridge: TokenBridge  # set with the engine
        places = options.max_batch + host.queue_size
        arenas = Arenas(self._allocate, keep_bytes=options.max_kv_bytes // KEEP_SHARE, left=lambda: self._memory.left)
        self._memory = KVMemory(options.max_kv_bytes, self._held_bytes, self._give_up_held, arenas.trim)
        self.tickets = Tickets(arenas, max_outstanding=places)
        self._slots = Slots(self.tickets, self._kv_address, max(options.max_batch, places * 3 // 4), waits)
        self._planner, self._decode_speed = Planner(options.split, self._admission), Fading(SPEED_WEIGHT)
        self._kv_server: KVServer | None = None
        self._scoring = 0  # prompts
        self.audits = Audits(options)

    @property
    def engine_alive(self) -> bool:
        return self._engine is None or self._engine.alive

    def figures(self) -> Figures:
        in_use = self._engine.kv_bytes if self._engine else 0
        return Figures(
            kv_bytes=max(self._memory.reserved, in_use),  # what is in use is also reserved: a leak of either shows
            kv_limit=self._memory.limit,
            kv_held_bytes=self._held_bytes(),
            queue_tokens=self.waiting_tokens,
            prefill_tokens_s=self._planner.speeds.latest,
            decode_tokens_s=self._decode_speed.value,
            senders=self.audits.figures,
            audit_every=self.audits.every,
        )

    @property
    def busy(self) -> bool:
        return self._scoring > 0 or (self._engine is not None and self._engine.running > 0)

    async def probe_engine(self) -> None:
        request = DecodeRequest(f"self-test-{secrets.token_hex(4)}", [0, 0], Sampling(max_tokens=1))
        feed = TokenFeed(self._bridge, time.monotonic() + TEST_LIMIT_S)
        try:
            self.engine.submit(request, feed)
            await feed.steps()
        finally:
            self.engine.cancel(request.id)
            feed.close()

    async def load(self) -> None:
        # The KV port is bound before the model loads, so that a port in use is reported at once.
        self._kv_server = KVServer(self._kv_address.host, self._kv_address.port, self.tickets)
        engine = await on_daemon_thread(self._prepare, "load")
        self._bridge = TokenBridge()
        engine.after_step(self._bridge.flush)
        self._engine = engine
        self.audits = Audits(self.host.engine, engine.info)
        self.state = "ok"

    async def close(self) -> None:
        if self._kv_server:
            await asyncio.to_thread(self._kv_server.close)
        await super().close()

    def endpoints(self) -> Sequence[ServiceCall[Any]]:
        return [
            ServiceCall("/decode", DecodeBody, self._events),
            ServiceCall("/generate", GenerateBody, self._events),
            ServiceCall("/score", ScoreBody, self._score),
        ]

    def _held_bytes(self) -> int:
        return self._engine.held_bytes if self._engine else 0

    def _give_up_held(self, nbytes: int) -> None:
        self.engine.give_up_held(nbytes)

    def _allocate(self, nbytes: int) -> Any:
        """Memory of the engine, which is loaded before the first ticket is issued."""
        return self.engine.allocate(nbytes)

    async def _events(self, body: GenerateBody, caller: Caller) -> AsyncGenerator[Event, None]:
        """The answer. POST /generate computes here what is not held of the prompt. POST /decode opens a slot first, and
        waits for KV, unless the caller offers a prefill host that would take longer than this one."""
        async with self.admitted(body, caller, body.sampling) as request:
            answer = await begin_answer(request, self.engine, body, self.work)
            kv = PromptKV()
            if answer.finish_reason is None:
                kv = await self._reserve(request, body)
                if isinstance(body, DecodeBody):
                    answers = any(caller.phase == "generating" for caller in self.active.values())
                    terms = self._planner.plan(request, kv, body, self.engine.info, answers=answers)
                    kv.spans = spans = terms.spans
                    if spans.local or not terms.chunks:
                        self._reserve_only_kv(request, kv)
                    logs.info("planned", layers=spans.layers, of=spans.of, reason=spans.reason)
                    if spans.local:
                        kv.local = spans.reason
                        yield LocalEvent(
                            request_id=request.id,
                            prompt_tokens=request.prompt_tokens,
                            held_tokens=kv.held_tokens,
                            reason=kv.local,
                        )
                    else:
                        kv.audit = body.audit
                        kv.slot = await self._slots.open(request, self.engine.info, terms, kv.memory)
                        yield kv.slot.event
                        async with aclosing(kv.slot.received(body.sender)) as told:
                            async for event in told:
                                yield event
            async with aclosing(self._answer(request, answer, kv, body)) as events:
                async for event in events:
                    yield event

    async def _score(self, body: ScoreBody, caller: Caller) -> AsyncGenerator[Event, None]:
        """POST /score: has a place in the batch, as an answer has."""
        async with self.admitted(body, caller, ONE_TOKEN) as request:
            tokens = request.tokens
            scores = PromptScores(tokens, body.top, self.engine.tokenizer.token_bytes)
            room = self._memory.reserve(self.engine.info.layout.nbytes(len(tokens)), request.share, request.cleanup)
            memory = await request.within_deadline(room, "there was no room for its KV")
            turn_s, began = await self._take_turn(request, PromptKV()), time.monotonic()
            score = partial(self.engine.score, tokens, body.top, scores.add)
            await self._scored(request, score, memory.use())
            compute_s = time.monotonic() - began
            self.count(computed_prompt_tokens=len(tokens) - 1)
            for event in scores.events():
                yield event
            scored = ScoredEvent(
                prompt_tokens=len(tokens), tokenise_s=request.tokenise_s, queue_s=turn_s, compute_s=compute_s
            )
            logs.info("scored", **scored.to_json())
            yield scored

    async def _scored(
        self, request: ActiveRequest, score: Callable[[Callable[[], bool]], None], dropped: Callable[[], None]
    ) -> None:
        """Wait for the engine, which ends after the chunk that it is in if the request does. dropped: is called when it
        has nothing of the request any more."""
        left = threading.Event()
        request.cleanup.callback(left.set)

        def work() -> None:
            try:
                score(left.is_set)
            finally:
                dropped()

        self._scoring += 1
        try:
            await request.within_deadline(on_daemon_thread(work, f"score-{request.id}"), "the prompt was not scored")
        finally:
            self._scoring -= 1
        request.computed()

    async def _reserve(self, request: ActiveRequest, body: GenerateBody) -> PromptKV:
        """Reserve the KV of prompt and answer, and look for held KV that the request can go on from."""
        salt, nbytes = body.cache_salt, self._kv_bytes(request)
        more = self._planner.room(body, request.prompt_tokens, self.engine.info)
        nbytes = max(nbytes, min(nbytes + more, self._memory.limit))
        held = self._find_held(request, salt)
        if (memory := self._memory.try_reserve(nbytes, request.share, request.cleanup)) is not None:
            return PromptKV(memory, held)
        if held is not None:
            held.release()  # else this request might wait for room that it occupies itself
        room = self._memory.reserve(nbytes, request.share, request.cleanup)
        memory = await request.within_deadline(room, "there was no room for its KV")
        return PromptKV(memory, self._find_held(request, salt))

    def _kv_bytes(self, request: ActiveRequest) -> int:
        """Of prompt and answer."""
        return self.engine.info.layout.nbytes(request.prompt_tokens + request.sampling.max_tokens)

    def _reserve_only_kv(self, request: ActiveRequest, kv: PromptKV) -> None:
        """The prompt does not arrive in chunks, or has arrived: others get the room for what chunks need beside it."""
        if kv.memory is not None:
            kv.memory.reduce(self._kv_bytes(request))

    def _find_held(self, request: ActiveRequest, salt: str) -> HeldKV | None:
        held = self.engine.find_held(request.tokens, salt)
        if held is not None:
            request.cleanup.callback(self._release_held, held)
        return held

    def _release_held(self, held: HeldKV) -> None:
        held.release()
        self._memory.wake()

    async def _answer(
        self, request: ActiveRequest, answer: GrowingAnswer, kv: PromptKV, body: GenerateBody
    ) -> AsyncGenerator[Event, None]:
        """The rest of the answer, if it is not whole already, and its end with the figures."""
        turn_s = 0.0
        if answer.finish_reason is None:
            salt, turn = body.cache_salt, asyncio.ensure_future(self._take_turn(request, kv))
            async with aclosing(meanwhile(turn, kv.slot)) as told:
                async for event in told:
                    yield event
            turn_s = turn.result()
            try:
                steps = asyncio.ensure_future(self._first_steps(request, kv, salt))
                async with aclosing(meanwhile(steps, kv.slot)) as told:
                    async for event in told:
                        yield event
                feed, first = steps.result()
            except KVRefuted as error:
                kv.refuted_s = time.monotonic() - request.slot_sent - turn_s
                yield self._refute(request, kv, error, salt)
                # the engine may have chosen tokens, which the form has taken
                request.constraint = await constraint_of(request, self.engine.tokenizer, body, self.work)
                feed, first = await self._first_steps(request, kv, salt)
            request.enter("generating")
            self._planner.end_tail(request)
            self._release_inputs(kv)
            self._reserve_only_kv(request, kv)
            events = partial(self._tokens, answer, kv)
            for event in events(first):
                yield event
            async with aclosing(rest_of(answer, feed, events, self.active[request.key].send_now)) as rest:
                async for event in rest:
                    yield event
        done = self._done(request, answer, kv, turn_s)
        logs.info("decoded", **done.figures)
        yield done

    def _tokens(self, answer: GrowingAnswer, kv: PromptKV, steps: Sequence[StepTokens]) -> Sequence[TokensEvent]:
        """The events of these steps. A NaN is the fault of received KV that no audit has accepted, else this host's."""
        try:
            return answer.add(steps)
        except ModelError as error:
            if kv.received is None or kv.deviation is not None:
                raise
            self.audits.refuted(kv.received.sender)
            raise KVRefuted(wrong(kv.received.sender, "a probability that it gives is no number")) from error

    async def _take_turn(self, request: ActiveRequest, kv: PromptKV) -> float:
        """Wait for a place in the batch; returns the seconds that it took."""
        ready = time.monotonic()
        request.enter("queued")
        turn = self._admission.take_turn(request.share, request.cleanup)
        await request.within_deadline(turn, "the request's turn had not come")
        waited_s = time.monotonic() - ready
        request.enter("computing the prompt" if kv.layers is not None else "generating")
        await self.active[request.key].state_begin()
        return waited_s

    async def _first_steps(
        self, request: ActiveRequest, kv: PromptKV, salt: str
    ) -> tuple[TokenFeed, Sequence[StepTokens]]:
        """Let the engine begin. KVRefuted if the received KV is wrong, whose request then is not in the engine."""
        received = kv.received
        order = kv.order_audit(self.audits)
        self.count(kv_bytes_total=received.nbytes if received is not None else 0)
        feed = self._submit(request, kv, salt, order)
        steps = await feed.steps()
        request.computed()
        if received is not None:
            try:
                kv.deviation = self.audits.judge(received.sender, order, steps[0], request.arrived)
            except KVRefuted:
                self.engine.cancel(request.key)
                raise
        return feed, steps

    def _refute(self, request: ActiveRequest, kv: PromptKV, error: KVRefuted, salt: str) -> RefutedEvent:
        """Let go of wrong KV, and of held KV that may be wrong, so that the engine computes the prompt."""
        refuted, held = kv.refute(error, self.audits, f"run `disagg verify {self.model.name}`")
        if held is not None:
            self._release_held(held)
            self.engine.forget_held(request.tokens, salt)
        self.count(refuted=1)
        fields = {"sender": refuted.sender, "reason": refuted.message, "blamed": refuted.blamed}
        logs.event(logging.WARNING, "kv_refuted", request_id=request.id, **fields)
        return refuted

    def _submit(self, request: ActiveRequest, kv: PromptKV, salt: str, order: AuditOrder | None) -> TokenFeed:
        """Give the request to the engine."""
        feed = TokenFeed(self._bridge, request.deadline)
        request.cleanup.callback(feed.close)
        assert kv.memory is not None, "reserved before the request's turn"
        request.cleanup.callback(self.engine.cancel, request.key, kv.memory.use())
        work = DecodeRequest(
            id=request.key,
            tokens=request.tokens,
            sampling=request.sampling,
            kv=kv.received if kv.whole else None,
            arriving=None if kv.whole else kv.arriving,
            held=kv.held,
            answered=request.answered,
            salt=salt,
            constraint=request.constraint,
            bad_words=request.bad_words,
            hold_prompt=request.hold_prompt,
            audit=order.limits if order is not None else None,
        )
        self.engine.submit(work, feed)
        return feed

    def _release_inputs(self, kv: PromptKV) -> None:
        """Release what the request has given the engine: from the first token on it uses its own copies."""
        if kv.arriving is not None:
            kv.arriving.release(reuse=True)
        if kv.held is not None:
            self._release_held(kv.held)

    def _done(self, request: ActiveRequest, answer: GrowingAnswer, kv: PromptKV, turn_s: float) -> DoneEvent:
        """The end of an answer that is finished."""
        assert answer.finish_reason is not None
        timing, computed = answer.timing, answer.timing.computed_prompt_tokens
        audited = kv.audited_tokens + (timing.audit.tokens if timing.audit is not None else 0)
        self.count(completion_tokens=answer.generated_tokens, computed_prompt_tokens=computed, audited_tokens=audited)
        self._planner.computed(kv, timing)
        if answer.generated_tokens > 1:
            self._decode_speed.add(answer.generated_tokens - 1, answer.decode_s)
        return DoneEvent(
            finish_reason=answer.finish_reason,
            stop=answer.stop,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            computed_prompt_tokens=computed,
            timing=request.timing(
                turn_s, timing, kv.accepted, answer.decode_s, kv.refuted_s, resumed=kv.resumed is not None
            ),
            local=kv.local,
            held_tokens=min(kv.held_tokens, request.prompt_tokens),
            simulated=self.host.simulated,
            kv_wire=kv.received.wire if kv.received else None,
            reasoning_tokens=answer.reasoning_tokens,
            audited_tokens=audited,
            deviation=kv.deviation,
            refuted=kv.refuted.message if kv.refuted else "",
            layers=kv.layers,
            resumed_at=kv.resumed,
        )
