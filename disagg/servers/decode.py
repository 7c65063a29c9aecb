"""The decode server: takes a prompt's KV off the wire and answers from it, token by token.

POST /decode opens a slot (one-time ticket, KV address) and streams once the KV is here; POST /generate computes the
prompt on this host. Whatever way a request ends, its ticket, its KV and its place in the batch are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disagg.config import Fleet, Host
from disagg.engines.base import DecodeEngine, DecodeRequest, DecodeTiming, EngineInfo
from disagg.errors import HandoffError, Overloaded
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.received import ReceivedKV
from disagg.kv.tickets import Expected, KVOutcome, Tickets
from disagg.kv.wire import WIRE_FORMS
from disagg.servers import logs
from disagg.servers.admission import Admission
from disagg.servers.answer import Answer, within
from disagg.servers.app import endpoint, stream
from disagg.servers.daemon import on_daemon_thread
from disagg.servers.feed import Handover, TokenFeed
from disagg.servers.job import Job
from disagg.servers.schemas import DecodeBody, GenerateBody
from disagg.servers.service import Service
from disagg.servers.sse import Event


class DecodeService(Service):
    """Serves POST /decode and POST /generate with one DecodeEngine and one KV listener."""

    role = "decode"

    def __init__(self, fleet: Fleet, host: Host, make_engine: Callable[[], DecodeEngine]) -> None:
        super().__init__(fleet, host)
        options = host.engine
        self._make_engine = make_engine
        self._engine: DecodeEngine | None = None
        self._handover: Handover  # once there is an engine
        self._admission = Admission(options.max_batch, host.queue_size)
        self._tickets = Tickets(
            max_kv_bytes=options.max_kv_bytes,
            max_outstanding=options.max_batch + host.queue_size,
            allocate=self._allocate,
        )
        self._kv_server: KVServer | None = None

    @property
    def engine(self) -> DecodeEngine:
        """The loaded engine."""
        if self._engine is None:
            raise Overloaded(f"{self.host.name} is still loading", "try again in a moment")
        return self._engine

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info if self._engine else None

    @property
    def engine_alive(self) -> bool:
        return self._engine is None or self._engine.alive

    async def load(self) -> None:
        assert self.host.kv_port is not None, "config.py requires kv_port on decode hosts"
        # Bound before the model loads: a taken port must not cost a model load to find out.
        self._kv_server = KVServer(self.host.kv_address, self.host.kv_port, self._tickets)
        engine = await on_daemon_thread(self._prepare, "load")
        self._handover = Handover()
        engine.after_step(self._handover.flush)
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

    def routes(self) -> Sequence[Route]:
        context = self.model.context
        return [
            Route("/decode", endpoint(DecodeBody, self._decode, context), methods=["POST"]),
            Route("/generate", endpoint(GenerateBody, self._generate, context), methods=["POST"]),
        ]

    def _allocate(self, nbytes: int) -> Any:
        """Memory of the engine, which is loaded by the time that there is a ticket for any."""
        return self.engine.allocate(nbytes)

    def load_figures(self) -> dict[str, int]:
        in_use = self._engine.kv_bytes if self._engine else 0
        held = max(self._tickets.held_bytes, in_use)  # what is in use is reserved; a leak of either would show
        return {"queue": self._admission.queued, "running": self._admission.running, "kv_bytes": held}

    async def _decode(self, request: Request, body: DecodeBody) -> Response:
        job = await self.admit(request, body, self.engine.tokenizer, self._admission)
        return stream(self.counted(job, self._handed_over(job, body.kv_failure)))

    async def _generate(self, request: Request, body: GenerateBody) -> Response:
        job = await self.admit(request, body, self.engine.tokenizer, self._admission)
        return stream(self.counted(job, self._answer(job, None)))

    async def _handed_over(self, job: Job, kv_failure: str) -> AsyncGenerator[Event, None]:
        """Offer a slot, wait for its KV, answer from it; the prompt is computed here where the caller wants that."""
        arrival: asyncio.Future[ReceivedKV] = asyncio.get_running_loop().create_future()
        yield "slot", self._open_slot(job, arrival)
        kv, fallback = None, ""
        try:
            kv = await within(arrival, job.deadline, "the KV had not arrived")
            self.counters.kv_bytes_total += kv.nbytes
        except HandoffError as error:
            if kv_failure == "fail":
                raise
            fallback = str(error)
        async with aclosing(self._answer(job, kv, fallback)) as answer:
            async for event in answer:
                yield event

    def _open_slot(self, job: Job, arrival: asyncio.Future[ReceivedKV]) -> dict[str, Any]:
        """Issue the job's ticket; its result settles `arrival`."""
        loop, info = asyncio.get_running_loop(), self.engine.info
        expected = Expected(
            request_id=job.id,
            layout=info.layout,
            fingerprint=info.fingerprint,
            token_hash=token_hash(job.tokens),
            tokens=len(job.tokens) - 1,
            wires=WIRE_FORMS,
        )

        def settle(result: KVOutcome) -> None:
            loop.call_soon_threadsafe(_settle, arrival, result)

        slot = self._tickets.issue(expected, settle, deadline=job.deadline)
        job.held.callback(self._tickets.revoke, slot.ticket)
        job.held.callback(_drop, arrival)
        job.slot_sent = time.monotonic()
        return {
            "request_id": job.id,
            "ticket": slot.ticket,
            "kv": {"host": self.host.kv_address, "port": self.host.kv_port},
            "prompt_tokens": len(job.tokens),
            "held_tokens": 0,
        }

    async def _answer(self, job: Job, kv: ReceivedKV | None, fallback: str = "") -> AsyncGenerator[Event, None]:
        """Wait for a place in the batch, run the engine, stream its tokens, close with the figures."""
        ready = time.monotonic()
        await within(self._admission.take_turn(job.held), job.deadline, "the request's turn had not come")
        queue_s = time.monotonic() - ready
        self._reserve(job, kv)
        feed = TokenFeed(self._handover)
        job.held.callback(self.engine.cancel, job.key)
        self.engine.submit(DecodeRequest(job.key, job.tokens, job.sampling, kv), feed)
        answer = Answer(self.engine.tokenizer.stream(job.sampling.stop))
        async for event in answer.events(feed.steps(job.deadline)):
            if kv is not None:  # by the first token the engine has made its own cache of it
                kv.release(reuse=True)
            yield event
        timing = answer.timing or DecodeTiming()
        self.counters.completion_tokens += answer.completion_tokens
        self.counters.computed_prompt_tokens += timing.computed_prompt_tokens
        parts = job.parts(queue_s, timing, kv.timing.accepted if kv else None)
        figures = {"fallback": fallback, "simulated": self.host.simulated, "kv_wire": kv.wire if kv else None}
        closing = answer.done(len(job.tokens), parts, timing.computed_prompt_tokens, **figures)
        logs.info("decoded", **closing[1])
        yield closing

    def _reserve(self, job: Job, kv: ReceivedKV | None) -> None:
        """Keep the KV's bytes, and room for the answer's, off the budget until the job ends. Overloaded if there is
        none. The received buffers go earlier: their reservation passes to the job with the engine's copy."""
        layout = self.engine.info.layout
        whole = layout.nbytes(len(job.tokens) + job.sampling.max_tokens)
        if kv is not None and kv.on_release is not None:
            job.held.callback(kv.on_release)
            kv.on_release = None
        reserved = kv.nbytes if kv is not None else 0
        job.held.callback(self._tickets.budget.reserve(max(0, whole - reserved)))


def _settle(arrival: asyncio.Future[ReceivedKV], result: KVOutcome) -> None:
    """On the event loop: hand the transfer's result to whoever still waits for it."""
    if arrival.done():
        if isinstance(result, ReceivedKV):
            result.release()
    elif isinstance(result, ReceivedKV):
        arrival.set_result(result)
    else:
        arrival.set_exception(result)


def _drop(arrival: asyncio.Future[ReceivedKV]) -> None:
    """Release the KV if it came, also where it came in the instant in which its request ended; else stop waiting."""
    if not arrival.done():
        arrival.cancel()
    elif not arrival.cancelled() and arrival.exception() is None:
        arrival.result().release()
