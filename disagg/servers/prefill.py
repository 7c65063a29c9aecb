"""The prefill server: computes a prompt's KV and pushes it, layer by layer, to a decode host.

One prompt computes at a time, because prefill is compute-bound; the transfer of the previous one may still drain.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from disagg.api.events import DoneEvent, Event, ShippedEvent
from disagg.api.names import WireForm
from disagg.api.requests import GenerateBody, KVAddress, PrefillBody
from disagg.api.sampling import Sampling
from disagg.config import Fleet, Host
from disagg.engines.base import DecodeTiming, PrefillEngine, PrefillTiming
from disagg.engines.model import preflight
from disagg.errors import Cancelled, DeadlineExceeded, DisaggError, RequestError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.send import SendLimits, Transfer
from disagg.servers import logs
from disagg.servers.admission import Admission
from disagg.servers.answer import Answer
from disagg.servers.feed import Handover, TokenFeed
from disagg.servers.kv_wire import MeasuredRates, choose
from disagg.servers.request import ActiveRequest
from disagg.servers.service import Endpoint, Service, on_daemon_thread

MAX_TRANSFERS = 2  # computing or draining: each holds a prompt's KV in memory
LIMITS = SendLimits(connect_s=3.0, answer_s=5.0)  # the next prompt waits while a decode host does not answer
ONE_TOKEN = Sampling(max_tokens=1)  # what a prompt needs room for at least
T = TypeVar("T")


class PrefillService(Service[PrefillEngine]):
    """Serves POST /prefill and POST /generate with one PrefillEngine."""

    role = "prefill"

    def __init__(self, fleet: Fleet, host: Host, make_engine: Callable[[], PrefillEngine]) -> None:
        super().__init__(fleet, host, Admission(MAX_TRANSFERS, host.queue_size))
        self._make_engine = make_engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self._compute = asyncio.Lock()
        self._closing = threading.Event()
        self._kv_bytes = 0
        self._rates = MeasuredRates()

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes

    async def probe_engine(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._compute:
            await loop.run_in_executor(self._thread, lambda: self.engine.prefill([0, 0], lambda _: None))

    async def load(self) -> None:
        self._engine = await on_daemon_thread(self._prepare, "load")
        self.state = "ok"

    def _prepare(self) -> PrefillEngine:
        """Load, refuse a model about which the two frameworks disagree, and run every kernel once."""
        engine = self._make_engine()
        preflight.require(engine.info.preflight)
        engine.warm_up()
        return engine

    async def close(self) -> None:
        self._closing.set()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def endpoints(self) -> Sequence[Endpoint[Any]]:
        return [Endpoint("/prefill", PrefillBody, self._prefill), Endpoint("/generate", GenerateBody, self._generate)]

    async def _prefill(self, body: PrefillBody, request_id: str) -> AsyncGenerator[Event, None]:
        """POST /prefill: one closing event, with what the prefill and its transfer took."""
        self._require_decode_host(body.deliver)
        async with self.admitted(body, request_id, ONE_TOKEN) as request:
            await self._take_turn(request)
            shipped = await self._ship(request, body)
            logs.info("prefilled", **shipped.to_json())
            yield shipped

    async def _ship(self, request: ActiveRequest, body: PrefillBody) -> ShippedEvent:
        """Compute while sending, and let the rest of the transfer drain while the next prompt computes."""
        transfers: list[Transfer] = []  # opened by the compute thread
        self._count_kv(request)
        try:
            async with self._computing(request):
                queue_s = time.monotonic() - request.tokenised
                request.phase = "computing the prompt"
                wire = self._wire_form(request, body.deliver)
                timing = await self._on_thread(
                    request,
                    lambda cancelled: self._compute_and_send(request, body, wire, transfers, cancelled),
                    on_cancel=lambda: _abort(transfers),
                )
            request.phase = "sending KV"
            result = await asyncio.to_thread(transfers[0].finish)
        finally:
            await asyncio.to_thread(_abort, transfers)  # without effect on a transfer that has finished
        self.count(computed_prompt_tokens=timing.tokens, kv_bytes_total=result.payload_bytes)
        self._rates.add((body.deliver.host, body.deliver.port), timing, result)
        return ShippedEvent(
            prompt_tokens=len(request.tokens),
            computed_tokens=timing.tokens,
            kv_bytes=result.payload_bytes,
            kv_wire=wire,
            tokenise_s=request.tokenise_s,
            queue_s=queue_s,
            compute_s=timing.compute_s,
            hidden_transfer_s=result.hidden_s(timing.ended),
            exposed_transfer_s=result.exposed_s(timing.ended),
        )

    async def _take_turn(self, request: ActiveRequest) -> None:
        turn = self._admission.take_turn(request.cleanup)
        await request.within_deadline(turn, "the prompt's turn had not come")

    def _count_kv(self, request: ActiveRequest) -> None:
        """Count the prompt's KV in `kv_bytes` until the request ends."""
        nbytes = self.engine.info.layout.nbytes(len(request.tokens) - 1)
        self._kv_bytes += nbytes

        def release() -> None:
            self._kv_bytes -= nbytes

        request.cleanup.callback(release)

    def _wire_form(self, request: ActiveRequest, to: KVAddress) -> WireForm:
        """The form in which the prompt's KV is sent; logged with its reasons if hosts.toml leaves the choice."""
        wanted = self.host.engine.kv_wire
        rates = self._rates.rates((to.host, to.port))
        wire = choose(wanted, self.engine.info.layout, len(request.tokens) - 1, rates)
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
        self,
        request: ActiveRequest,
        body: PrefillBody,
        wire: WireForm,
        transfers: list[Transfer],
        cancelled: Callable[[], bool],
    ) -> PrefillTiming:
        """On the compute thread. The transfer is opened before the first token is computed."""
        header = self._header(request, body.ticket, wire)
        to = body.deliver
        transfer = Transfer.open(to.host, to.port, header, deadline=request.deadline, limits=LIMITS)
        transfers.append(transfer)
        return self.engine.prefill(request.tokens[:-1], transfer.send, cancelled=cancelled, wire=wire)

    def _header(self, request: ActiveRequest, ticket: str, wire: WireForm) -> Header:
        info = self.engine.info
        return Header(
            ticket=ticket,
            request_id=request.id,
            fingerprint=info.fingerprint,
            layout=info.layout,
            token_hash=token_hash(request.tokens),
            tokens=len(request.tokens) - 1,
            wire=wire,
        )

    def _require_decode_host(self, to: KVAddress) -> None:
        """KV is sent only to decode hosts of this model that hosts.toml names."""
        known = {(host.kv_address, host.kv_port) for host in self.fleet.serving(self.model.name, "decode")}
        if (to.host, to.port) not in known:
            raise RequestError(
                f"deliver: {to.host}:{to.port} is no decode host of {self.model.name}",
                "give both hosts the same hosts.toml",
            )

    async def _generate(self, body: GenerateBody, request_id: str) -> AsyncGenerator[Event, None]:
        """POST /generate: prompt and answer on this host. The engine does not wait for whoever reads the answer."""
        async with self.admitted(body, request_id, body.sampling) as request:
            await self._take_turn(request)
            feed = TokenFeed(Handover(), request.deadline)
            request.cleanup.callback(feed.close)
            answer = Answer(self.engine.tokenizer.stream(request.sampling.stop))
            run = asyncio.ensure_future(self._run_engine(request, feed))
            try:
                while answer.finish_reason is None:
                    yield answer.add(await feed.steps())
            finally:
                run.cancel()
                await asyncio.wait((run,))
            self.count(completion_tokens=answer.completion_tokens, computed_prompt_tokens=len(request.tokens))
            done = DoneEvent(
                finish_reason=answer.finish_reason,
                prompt_tokens=len(request.tokens),
                completion_tokens=answer.completion_tokens,
                computed_prompt_tokens=len(request.tokens),
                timing=request.timing(
                    answer.timing.submitted - request.tokenised, answer.timing, None, answer.decode_s
                ),
                simulated=self.host.simulated,
            )
            logs.info("generated", **done.to_json())
            yield done

    async def _run_engine(self, request: ActiveRequest, feed: TokenFeed) -> None:
        try:
            async with self._computing(request):
                request.phase = "generating"
                await self._on_thread(request, lambda cancelled: self._generate_tokens(request, feed, cancelled))
        except Exception as error:  # noqa: BLE001 - `feed.steps` raises it
            feed.on_error(error)

    def _generate_tokens(self, request: ActiveRequest, feed: TokenFeed, cancelled: Callable[[], bool]) -> None:
        """On the compute thread."""
        now = time.monotonic()
        timing = DecodeTiming(submitted=now, started=now, ingested=now)
        for token in self.engine.generate(request.tokens, request.sampling, cancelled=cancelled):
            timing.first_token = timing.first_token or time.monotonic()
            feed.on_tokens((token,), timing)
            feed.flush()

    @asynccontextmanager
    async def _computing(self, request: ActiveRequest) -> AsyncIterator[None]:
        """The compute thread for this request alone. Raises DeadlineExceeded if it is not free in time."""
        await request.within_deadline(self._compute.acquire(), "the compute thread was not free")
        try:
            yield
        finally:
            self._compute.release()

    async def _on_thread(
        self,
        request: ActiveRequest,
        work: Callable[[Callable[[], bool]], T],
        on_cancel: Callable[[], object] = lambda: None,
    ) -> T:
        """Run `work(cancelled)` on the compute thread and return when the thread is free again. `cancelled` returns
        True after the request's deadline, after a cancellation and when the server closes."""
        cancel = threading.Event()

        def cancelled() -> bool:
            return cancel.is_set() or self._closing.is_set() or time.monotonic() > request.deadline

        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, work, cancelled)
        try:
            return await asyncio.shield(future)
        except Cancelled:
            if time.monotonic() > request.deadline:
                raise DeadlineExceeded("the prompt was not computed by the request's deadline", "raise it") from None
            raise
        except asyncio.CancelledError:
            cancel.set()
            await asyncio.wait((loop.run_in_executor(None, on_cancel), future))
            if not future.cancelled() and (error := future.exception()) and not isinstance(error, DisaggError):
                logs.log.error("failed_while_cancelling", exc_info=error)
            raise


def _abort(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.abort()
