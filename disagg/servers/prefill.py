"""The prefill server: computes a prompt's KV and pushes it, layer by layer, to a decode host.

One prompt computes at a time, because prefill is compute-bound; the transfer of the previous one may still drain.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.config import Fleet, Host
from disagg.engines.base import EngineInfo, PrefillEngine, PrefillTiming
from disagg.errors import Cancelled, DisaggError, HandoffError, RequestError
from disagg.kv.fingerprint import token_hash
from disagg.kv.send import Header, Transfer, TransferResult
from disagg.servers import logs
from disagg.servers.admission import Admission
from disagg.servers.app import endpoint
from disagg.servers.schemas import GenerateBody, PrefillBody
from disagg.servers.service import Service
from disagg.servers.sse import Event, EventStream, until_disconnect

MAX_DRAINING_TRANSFERS = 2
T = TypeVar("T")


@dataclass(slots=True)
class Shipment:
    """One finished prefill and how long its steps took, in seconds on this host's monotonic clock."""

    tokenise_s: float
    queue_s: float
    timing: PrefillTiming
    result: TransferResult

    def to_json(self, prompt_tokens: int) -> dict[str, Any]:
        exposed = max(0.0, self.result.acknowledged - self.timing.ended)
        hidden = max(0.0, min(self.timing.ended, self.result.acknowledged) - self.result.first_byte)
        return {
            "prompt_tokens": prompt_tokens,
            "computed_tokens": self.timing.tokens,
            "kv_bytes": self.result.payload_bytes,
            "tokenise_s": self.tokenise_s,
            "queue_s": self.queue_s,
            "compute_s": self.timing.compute_s,
            "hidden_transfer_s": hidden,
            "exposed_transfer_s": exposed,
        }


class PrefillService(Service):
    """Serves POST /prefill and POST /generate with one PrefillEngine."""

    role = "prefill"

    def __init__(self, fleet: Fleet, host: Host, make_engine: Callable[[], PrefillEngine]) -> None:
        super().__init__(fleet, host)
        self._make_engine = make_engine
        self._engine: PrefillEngine | None = None
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self._admission = Admission(running_limit=1, queue_limit=host.queue_size)
        self._draining = asyncio.Semaphore(MAX_DRAINING_TRANSFERS)

    @property
    def engine(self) -> PrefillEngine:
        if self._engine is None:
            raise DisaggError("the model is not loaded yet")
        return self._engine

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info if self._engine else None

    async def load(self) -> None:
        loop = asyncio.get_running_loop()
        self._engine = await loop.run_in_executor(self._compute, self._make_engine)
        self.state = "ok"

    async def close(self) -> None:
        self._compute.shutdown(wait=True, cancel_futures=True)

    def routes(self) -> Sequence[Route]:
        return [
            Route("/prefill", endpoint(PrefillBody, self._prefill), methods=["POST"]),
            Route("/generate", endpoint(GenerateBody, self._generate), methods=["POST"]),
        ]

    def load_figures(self) -> dict[str, int]:
        return {"queue": self._admission.queued, "running": self._admission.running, "kv_bytes": 0}

    async def _prefill(self, request: Request, body: PrefillBody) -> Response:
        self.require_ready(body.model)
        self._require_known_destination(body)
        self.counters.requests += 1
        error: BaseException | None = None
        try:
            work = self._deliver(body, request.scope["disagg.request_id"])
            return JSONResponse(await until_disconnect(request.receive, work))
        except Cancelled:
            error = asyncio.CancelledError()
            raise
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.count_end(error)

    async def _deliver(self, body: PrefillBody, request_id: str) -> dict[str, Any]:
        began = time.monotonic()
        tokens = await self.tokenise(self.engine.tokenizer, body.content)
        self.require_context(len(tokens), 1)
        tokenised = time.monotonic()
        with self._admission.place():
            async with asyncio.timeout(body.deadline_s):
                shipment = await self._ship(tokens, body, request_id, began, tokenised)
        self.counters.prompt_tokens += len(tokens)
        self.counters.computed_prompt_tokens += shipment.timing.tokens
        self.counters.kv_bytes_total += shipment.result.payload_bytes
        answer = shipment.to_json(len(tokens))
        logs.info("prefilled", **answer)
        return answer

    async def _ship(
        self, tokens: list[int], body: PrefillBody, request_id: str, began: float, tokenised: float
    ) -> Shipment:
        """Wait for a turn, compute while sending, then let the rest drain outside the turn."""
        async with self._draining:
            async with self._admission.turn():
                turn = time.monotonic()
                header = self._header(tokens, body, request_id)
                transfer, timing = await self._on_compute_thread(
                    lambda cancelled: self._compute_and_send(tokens, body, header, cancelled)
                )
            try:
                result = await asyncio.to_thread(transfer.finish)
            except BaseException:
                transfer.abort()
                raise
        return Shipment(tokenised - began, turn - tokenised, timing, result)

    def _compute_and_send(
        self, tokens: list[int], body: PrefillBody, header: Header, cancelled: Callable[[], bool]
    ) -> tuple[Transfer, PrefillTiming]:
        transfer = Transfer.open((body.deliver.host, body.deliver.port), header, deadline_s=body.deadline_s)
        try:
            return transfer, self.engine.prefill(tokens[:-1], transfer.send, cancelled=cancelled)
        except BaseException:
            transfer.abort()
            raise

    def _header(self, tokens: list[int], body: PrefillBody, request_id: str) -> Header:
        info = self.engine.info
        return Header(
            ticket=body.ticket,
            request_id=request_id,
            fingerprint=info.fingerprint,
            layout=info.layout,
            tokens=len(tokens) - 1,
            token_hash=token_hash(tokens),
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
        self.require_ready(body.model)
        tokens = await self.tokenise(self.engine.tokenizer, body.content)
        self.require_context(len(tokens), body.sampling.max_tokens)
        self.counters.requests += 1
        place = self._admission.place()
        place.__enter__()
        return EventStream(self._alone(tokens, body, place))

    async def _alone(self, tokens: list[int], body: GenerateBody, place: Any) -> AsyncGenerator[Event, None]:
        raise NotImplementedError

    async def _on_compute_thread(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run `work(cancelled)` on the compute thread; on cancellation tell it, and wait until it has let go."""
        cancel = threading.Event()
        future = asyncio.get_running_loop().run_in_executor(self._compute, work, cancel.is_set)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            cancel.set()
            await asyncio.wait((future,))
            if (
                not future.cancelled()
                and (error := future.exception())
                and not isinstance(error, HandoffError | Cancelled)
            ):
                logs.log.error("failed_while_cancelling", exc_info=error)
            raise
