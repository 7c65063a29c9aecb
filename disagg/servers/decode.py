"""The decode server: receives a prompt's KV and generates the answer from it.

POST /decode opens a slot (one-time ticket, KV address) and streams once the KV is here; POST /generate computes the
prompt on this host. However a request ends, its ticket, its KV and its place in the batch are released.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from disagg.api.events import DoneEvent, Event, SlotEvent
from disagg.api.requests import DecodeBody, GenerateBody, KVAddress
from disagg.api.sampling import Sampling
from disagg.config import Fleet, Host
from disagg.engines.base import DecodeEngine, DecodeRequest
from disagg.errors import HandoffError
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.received import ReceivedKV
from disagg.kv.tickets import Expected, KVOutcome, Tickets
from disagg.kv.wire import WIRE_FORMS
from disagg.servers import logs
from disagg.servers.admission import Admission
from disagg.servers.answer import Answer
from disagg.servers.feed import Handover, TokenFeed
from disagg.servers.health.engine import TEST_LIMIT_S
from disagg.servers.request import ActiveRequest
from disagg.servers.service import Endpoint, Service, on_daemon_thread


class DecodeService(Service[DecodeEngine]):
    """Serves POST /decode and POST /generate with one DecodeEngine and one KV listener."""

    role = "decode"

    def __init__(self, fleet: Fleet, host: Host, make_engine: Callable[[], DecodeEngine]) -> None:
        options = host.engine
        super().__init__(fleet, host, Admission(options.max_batch, host.queue_size))
        assert host.kv_port is not None, "config requires kv_port on decode hosts"
        self._kv_address = KVAddress(host.kv_address, host.kv_port)
        self._make_engine = make_engine
        self._handover: Handover  # set with the engine
        self._tickets = Tickets(
            max_kv_bytes=options.max_kv_bytes,
            max_outstanding=options.max_batch + host.queue_size,
            allocate=self._allocate,
        )
        self._kv_server: KVServer | None = None

    @property
    def engine_alive(self) -> bool:
        return self._engine is None or self._engine.alive

    @property
    def kv_bytes(self) -> int:
        in_use = self._engine.kv_bytes if self._engine else 0
        return max(self._tickets.held_bytes, in_use)  # what is in use is also reserved: a leak of either shows

    @property
    def busy(self) -> bool:
        return self._engine is not None and self._engine.running > 0

    async def probe_engine(self) -> None:
        request = DecodeRequest(f"self-test-{secrets.token_hex(4)}", [0, 0], Sampling(max_tokens=1))
        feed = TokenFeed(self._handover, time.monotonic() + TEST_LIMIT_S)
        try:
            self.engine.submit(request, feed)
            await feed.steps()
        finally:
            self.engine.cancel(request.id)
            feed.close()

    async def load(self) -> None:
        # The KV port is bound before the model loads, so that a port in use is reported at once.
        self._kv_server = KVServer(self._kv_address.host, self._kv_address.port, self._tickets)
        engine = await on_daemon_thread(self._prepare, "load")
        self._handover = Handover()
        engine.after_step(self._handover.flush)
        engine.on_beat = self.progress.beat
        self._engine = engine
        self.state = "ok"

    def _prepare(self) -> DecodeEngine:
        engine = self._make_engine()
        engine.warm_up()
        return engine

    async def close(self) -> None:
        if self._kv_server:
            await asyncio.to_thread(self._kv_server.close)
        if self._engine:
            await asyncio.to_thread(self._engine.close)

    def endpoints(self) -> Sequence[Endpoint[Any]]:
        return [Endpoint("/decode", DecodeBody, self._decode), Endpoint("/generate", GenerateBody, self._generate)]

    def _allocate(self, nbytes: int) -> Any:
        """Memory of the engine, which is loaded before the first ticket is issued."""
        return self.engine.allocate(nbytes)

    async def _decode(self, body: DecodeBody, request_id: str) -> AsyncGenerator[Event, None]:
        """POST /decode: a slot, then the answer from the KV that arrives there. If it does not arrive whole, the
        prompt is computed here, or the request fails, as the caller chose."""
        async with self.admitted(body, request_id, body.sampling) as request:
            answer = await self._begin_answer(request)
            if answer.finish_reason is not None:
                yield self._done(request, answer, 0.0, None, "")
                return
            arrival: asyncio.Future[ReceivedKV] = asyncio.get_running_loop().create_future()
            yield self._open_slot(request, arrival)
            kv, fallback = None, ""
            try:
                kv = await request.within_deadline(arrival, "the KV had not arrived")
                self.count(kv_bytes_total=kv.nbytes)
            except HandoffError as error:
                if body.kv_failure == "fail":
                    raise
                fallback = str(error)
            async with aclosing(self._answer(request, answer, kv, fallback)) as events:
                async for event in events:
                    yield event

    async def _generate(self, body: GenerateBody, request_id: str) -> AsyncGenerator[Event, None]:
        """POST /generate: the prompt is computed here."""
        async with self.admitted(body, request_id, body.sampling) as request:
            answer = await self._begin_answer(request)
            if answer.finish_reason is not None:
                yield self._done(request, answer, 0.0, None, "")
                return
            async with aclosing(self._answer(request, answer, None)) as events:
                async for event in events:
                    yield event

    async def _begin_answer(self, request: ActiveRequest) -> Answer:
        """The answer, with the tokens that another host has generated; on a worker thread if there are any, since their
        text is computed."""
        text = self.engine.tokenizer.stream(request.sampling.stop)
        given = request.tokens[request.prompt_tokens :]
        eos_ids = self.engine.info.eos_ids
        if not given:
            return Answer(text)
        return await asyncio.to_thread(Answer.resumed, text, given, request.sampling, eos_ids)

    def _open_slot(self, request: ActiveRequest, arrival: asyncio.Future[ReceivedKV]) -> SlotEvent:
        """Issue the request's ticket; the outcome of its transfer settles `arrival`."""
        loop, info = asyncio.get_running_loop(), self.engine.info
        expected = Expected(
            request_id=request.id,
            layout=info.layout,
            fingerprint=info.fingerprint,
            token_hash=token_hash(request.tokens),
            tokens=len(request.tokens) - 1,
            wires=WIRE_FORMS,
        )

        def settle(outcome: KVOutcome) -> None:
            loop.call_soon_threadsafe(_settle, arrival, outcome)

        slot = self._tickets.issue(expected, settle, deadline=request.deadline)
        request.cleanup.callback(self._tickets.revoke, slot.ticket)
        request.cleanup.callback(_drop, arrival)
        request.phase, request.slot_sent = "waiting for KV", time.monotonic()
        return SlotEvent(
            request_id=request.id, ticket=slot.ticket, kv=self._kv_address, prompt_tokens=request.prompt_tokens
        )

    async def _answer(
        self, request: ActiveRequest, answer: Answer, kv: ReceivedKV | None, fallback: str = ""
    ) -> AsyncGenerator[Event, None]:
        """Wait for a place in the batch, run the engine, stream its tokens, end with the figures."""
        ready = time.monotonic()
        request.phase = "queued"
        await request.within_deadline(self._admission.take_turn(request.cleanup), "the request's turn had not come")
        turn_s = time.monotonic() - ready
        self._reserve(request, kv)
        feed = TokenFeed(self._handover, request.deadline)
        request.cleanup.callback(feed.close)
        request.cleanup.callback(self.engine.cancel, request.key)
        request.phase = "generating"
        work = DecodeRequest(request.key, request.tokens, request.sampling, kv, answered=request.answered)
        self.engine.submit(work, feed)
        while answer.finish_reason is None:
            event = answer.add(await feed.steps())
            if kv is not None:  # from the first token on the engine uses its own copy
                kv.release(reuse=True)
            yield event
        yield self._done(request, answer, turn_s, kv, fallback)

    def _done(
        self, request: ActiveRequest, answer: Answer, turn_s: float, kv: ReceivedKV | None, fallback: str
    ) -> DoneEvent:
        """The end of an answer that is finished."""
        assert answer.finish_reason is not None
        computed = answer.timing.computed_prompt_tokens
        self.count(completion_tokens=answer.generated_tokens, computed_prompt_tokens=computed)
        done = DoneEvent(
            finish_reason=answer.finish_reason,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            computed_prompt_tokens=computed,
            timing=request.timing(turn_s, answer.timing, kv.timing.accepted if kv else None, answer.decode_s),
            fallback=fallback,
            simulated=self.host.simulated,
            kv_wire=kv.wire if kv else None,
        )
        logs.info("decoded", **done.to_json())
        return done

    def _reserve(self, request: ActiveRequest, kv: ReceivedKV | None) -> None:
        """Reserve the bytes of the prompt's and the answer's KV until the request ends. Raises Overloaded if there is
        no room. The received buffers are released earlier; their reservation passes to the request."""
        total = self.engine.info.layout.nbytes(request.prompt_tokens + request.sampling.max_tokens)
        if kv is not None and kv.on_release is not None:
            request.cleanup.callback(kv.on_release)
            kv.on_release = None
        reserved = kv.nbytes if kv is not None else 0
        request.cleanup.callback(self._tickets.budget.reserve(max(0, total - reserved)))


def _settle(arrival: asyncio.Future[ReceivedKV], outcome: KVOutcome) -> None:
    """On the event loop: pass the transfer's outcome to the request, or release it if the request has ended."""
    if arrival.done():
        if isinstance(outcome, ReceivedKV):
            outcome.release()
    elif isinstance(outcome, ReceivedKV):
        arrival.set_result(outcome)
    else:
        arrival.set_exception(outcome)


def _drop(arrival: asyncio.Future[ReceivedKV]) -> None:
    """Release the KV if it has arrived, even in the moment in which its request ended; else stop waiting for it."""
    if not arrival.done():
        arrival.cancel()
    elif not arrival.cancelled() and arrival.exception() is None:
        arrival.result().release()
