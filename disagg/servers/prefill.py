"""The prefill server: computes a prompt's KV and pushes it, layer by layer, to a decode host.

One prompt computes at a time, because prefill is compute-bound; the transfer of the previous one may still drain.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disagg.config import Fleet, Host
from disagg.engines.base import DecodeTiming, EngineInfo, PrefillEngine, PrefillTiming
from disagg.engines.model import preflight
from disagg.errors import Cancelled, DeadlineExceeded, DisaggError, Overloaded, RequestError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.send import SendLimits, Transfer, TransferResult
from disagg.kv.wire import WireForm
from disagg.servers import logs
from disagg.servers.admission import Admission
from disagg.servers.answer import Answer, within
from disagg.servers.app import endpoint, stream
from disagg.servers.daemon import on_daemon_thread
from disagg.servers.feed import Handover, TokenFeed
from disagg.servers.job import Job
from disagg.servers.kv_wire import SeenRates, choose
from disagg.servers.schemas import GenerateBody, PrefillBody
from disagg.servers.service import Service
from disagg.servers.sse import Event

MAX_TRANSFERS = 2  # computing or draining: each holds a prompt's KV in memory
LIMITS = SendLimits(connect_s=3.0, answer_s=5.0)  # the next prompt waits while a decode host does not answer
T = TypeVar("T")


class PrefillService(Service):
    """Serves POST /prefill and POST /generate with one PrefillEngine."""

    role = "prefill"

    def __init__(self, fleet: Fleet, host: Host, make_engine: Callable[[], PrefillEngine]) -> None:
        super().__init__(fleet, host)
        self._make_engine = make_engine
        self._engine: PrefillEngine | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self._admission = Admission(MAX_TRANSFERS, host.queue_size)
        self._compute = asyncio.Lock()
        self._closing = threading.Event()
        self._kv_bytes = 0
        self._seen = SeenRates()

    @property
    def engine(self) -> PrefillEngine:
        """The loaded engine."""
        if self._engine is None:
            raise Overloaded(f"{self.host.name} is still loading", "try again in a moment")
        return self._engine

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info if self._engine else None

    async def load(self) -> None:
        self._engine = await on_daemon_thread(self._prepare, "load")
        self.state = "ok"

    def _prepare(self) -> PrefillEngine:
        """Load, refuse what the two frameworks would not agree on, and run every kernel once."""
        engine = self._make_engine()
        preflight.require(engine.info.preflight)
        engine.warm_up()
        return engine

    async def close(self) -> None:
        self._closing.set()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def routes(self) -> Sequence[Route]:
        context = self.model.context
        return [
            Route("/prefill", endpoint(PrefillBody, self._prefill, context), methods=["POST"]),
            Route("/generate", endpoint(GenerateBody, self._generate, context), methods=["POST"]),
        ]

    def load_figures(self) -> dict[str, int]:
        return {"queue": self._admission.queued, "running": self._admission.running, "kv_bytes": self._kv_bytes}

    async def _prefill(self, request: Request, body: PrefillBody) -> Response:
        self._require_known_destination(body)
        job = await self.admit(request, body, self.engine.tokenizer, self._admission)
        return stream(self.counted(job, self._shipped(job, body)))

    async def _shipped(self, job: Job, body: PrefillBody) -> AsyncGenerator[Event, None]:
        """One closing event: what the prefill and its transfer cost."""
        yield "shipped", await self._ship(job, body)

    async def _ship(self, job: Job, body: PrefillBody) -> dict[str, Any]:
        """Wait for a turn, compute while sending, and let the rest drain while the next prompt computes."""
        await within(self._admission.take_turn(job.held), job.deadline, "the prompt's turn had not come")
        outbox: list[Transfer] = []  # what the compute thread has opened
        self._hold(job)
        try:
            async with self._computing(job):
                queue_s = time.monotonic() - job.tokenised
                wire = self._wire_form(job, body)
                timing = await self._on_thread(
                    job,
                    lambda cancelled: self._compute_and_send(job, body, wire, outbox, cancelled),
                    on_cancel=lambda: _abort(outbox),
                )
            result = await asyncio.to_thread(outbox[0].finish)
        finally:
            await asyncio.to_thread(_abort, outbox)  # without effect where the transfer has finished
        self.counters.computed_prompt_tokens += timing.tokens
        self.counters.kv_bytes_total += result.payload_bytes
        self._seen.note((body.deliver.host, body.deliver.port), timing, result)
        account = _account(job, queue_s, timing, result, wire)
        logs.info("prefilled", **account)
        return account

    def _hold(self, job: Job) -> None:
        """Count the prompt's KV as held until the job ends."""
        nbytes = self.engine.info.layout.nbytes(len(job.tokens) - 1)
        self._kv_bytes += nbytes

        def let_go() -> None:
            self._kv_bytes -= nbytes

        job.held.callback(let_go)

    def _wire_form(self, job: Job, body: PrefillBody) -> WireForm:
        """How the job's KV goes. Said in the log with its reason, where the choice is this host's."""
        wanted = self.host.engine.kv_wire
        rates = self._seen.rates((body.deliver.host, body.deliver.port))
        wire = choose(wanted, self.engine.info.layout, len(job.tokens) - 1, rates)
        if wanted == "auto":
            logs.info(
                "kv_wire",
                chosen=wire,
                tokens_per_s=rates.tokens_s,
                link_bytes_per_s=rates.link_bytes_s,
                link_fell_behind=rates.behind,
            )
        return wire

    def _compute_and_send(
        self, job: Job, body: PrefillBody, wire: WireForm, outbox: list[Transfer], cancelled: Callable[[], bool]
    ) -> PrefillTiming:
        deliver = body.deliver
        header = self._header(job, body, wire)
        transfer = Transfer.open(deliver.host, deliver.port, header, deadline=job.deadline, limits=LIMITS)
        outbox.append(transfer)
        return self.engine.prefill(job.tokens[:-1], transfer.send, cancelled=cancelled, wire=wire)

    def _header(self, job: Job, body: PrefillBody, wire: WireForm) -> Header:
        info = self.engine.info
        return Header(
            ticket=body.ticket,
            request_id=job.id,
            fingerprint=info.fingerprint,
            layout=info.layout,
            token_hash=token_hash(job.tokens),
            tokens=len(job.tokens) - 1,
            wire=wire,
        )

    def _require_known_destination(self, body: PrefillBody) -> None:
        """KV leaves only for decode hosts of this model that hosts.toml names."""
        known = {(host.kv_address, host.kv_port) for host in self.fleet.serving(self.model.name, "decode")}
        if (body.deliver.host, body.deliver.port) not in known:
            raise RequestError(
                f"deliver: {body.deliver.host}:{body.deliver.port} is no decode host of {self.model.name}",
                "give both hosts the same hosts.toml",
            )

    async def _generate(self, request: Request, body: GenerateBody) -> Response:
        job = await self.admit(request, body, self.engine.tokenizer, self._admission)
        return stream(self.counted(job, self._alone(job)))

    async def _alone(self, job: Job) -> AsyncGenerator[Event, None]:
        """Prompt and answer on this host. The engine runs at its own pace, not at that of whoever reads the answer."""
        feed, timing = TokenFeed(Handover()), DecodeTiming()
        await within(self._admission.take_turn(job.held), job.deadline, "the prompt's turn had not come")
        answer = Answer(self.engine.tokenizer.stream(job.sampling.stop))
        run = asyncio.ensure_future(self._run_alone(job, feed, timing))
        try:
            async with aclosing(answer.events(feed.steps(job.deadline))) as events:
                async for event in events:
                    yield event
        finally:
            run.cancel()
            await asyncio.wait((run,))
        self.counters.completion_tokens += answer.completion_tokens
        self.counters.computed_prompt_tokens += len(job.tokens)
        parts = job.parts(timing.submitted - job.tokenised, timing, None)
        yield answer.done(len(job.tokens), parts, len(job.tokens), simulated=self.host.simulated)

    async def _run_alone(self, job: Job, feed: TokenFeed, timing: DecodeTiming) -> None:
        try:
            async with self._computing(job):
                await self._on_thread(job, lambda cancelled: self._drain(job, feed, timing, cancelled))
        except DisaggError as error:
            feed.on_error(error)

    def _drain(self, job: Job, feed: TokenFeed, timing: DecodeTiming, cancelled: Callable[[], bool]) -> None:
        timing.submitted = timing.started = timing.ingested = time.monotonic()
        for token in self.engine.generate(job.tokens, job.sampling, cancelled=cancelled):
            timing.first_token = timing.first_token or time.monotonic()
            feed.on_tokens((token,), timing)
            feed.flush()

    @asynccontextmanager
    async def _computing(self, job: Job) -> AsyncIterator[None]:
        """The compute thread for oneself, got by the job's deadline."""
        await within(self._compute.acquire(), job.deadline, "the compute thread was not free")
        try:
            yield
        finally:
            self._compute.release()

    async def _on_thread(
        self, job: Job, work: Callable[[Callable[[], bool]], T], on_cancel: Callable[[], object] = lambda: None
    ) -> T:
        """Run `work(cancelled)` on the compute thread. Past the job's deadline, on cancellation and when the server
        closes `cancelled` turns true; returns only when the thread has let go."""
        cancel = threading.Event()

        def cancelled() -> bool:
            return cancel.is_set() or self._closing.is_set() or time.monotonic() > job.deadline

        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, work, cancelled)
        try:
            return await asyncio.shield(future)
        except Cancelled:
            if time.monotonic() > job.deadline:
                raise DeadlineExceeded("the prompt was not computed by the request's deadline", "raise it") from None
            raise
        except asyncio.CancelledError:
            cancel.set()
            await asyncio.wait((loop.run_in_executor(None, on_cancel), future))
            if not future.cancelled() and (error := future.exception()) and not isinstance(error, DisaggError):
                logs.log.error("failed_while_cancelling", exc_info=error)
            raise


def _abort(outbox: Sequence[Transfer]) -> None:
    for transfer in outbox:
        transfer.abort()


def _account(job: Job, queue_s: float, timing: PrefillTiming, result: TransferResult, wire: WireForm) -> dict[str, Any]:
    """What /prefill answers: durations in seconds on this host's clock.

    hidden: bytes moved while the prompt computed. exposed: end of compute -> the receiver's acknowledgement.
    """
    return {
        "prompt_tokens": len(job.tokens),
        "computed_tokens": timing.tokens,
        "kv_bytes": result.payload_bytes,
        "kv_wire": wire,
        "tokenise_s": job.tokenise_s,
        "queue_s": queue_s,
        "compute_s": timing.compute_s,
        "hidden_transfer_s": result.hidden_s(timing.ended),
        "exposed_transfer_s": result.exposed_s(timing.ended),
    }
