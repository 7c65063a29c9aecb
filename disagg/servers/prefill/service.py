"""The prefill server: computes a prompt's KV and pushes it, layer by layer, to a decode host.

`scheduler` decides which prompt is computed next; transfers drain while others are computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from disagg import logs
from disagg.api.events import DoneEvent, Event, ScoredEvent, ShippedEvent
from disagg.api.layout import Layout
from disagg.api.names import KV_CHUNKS, KV_WHOLE, WireForm
from disagg.api.requests import GenerateBody, KVAddress, PrefillBody, ScoreBody
from disagg.config import Fleet, Host
from disagg.engines.base import (
    ONE_TOKEN,
    AnswerRequest,
    DecodeTiming,
    PrefillEngine,
    PrefillRun,
    PrefillTiming,
    SendingEngine,
    Token,
)
from disagg.errors import CapabilityMissing, RequestError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.servers.host.admission import Admission
from disagg.servers.host.feed import TokenBridge, TokenFeed
from disagg.servers.host.report import Figures
from disagg.servers.host.request import STATE_S, ActiveRequest, Caller, Phase
from disagg.servers.host.service import Service, ServiceCall
from disagg.servers.host.work import on_daemon_thread
from disagg.servers.output.answer import GrowingAnswer, begin_answer, rest_of
from disagg.servers.output.scores import PromptScores
from disagg.servers.prefill.delivery import MeasuredRates, Receivers, choose_form, delivery_by
from disagg.servers.prefill.order import ON_CPU, Policy
from disagg.servers.prefill.scheduler import PromptJob, Scheduler

QUEUE_CONTEXTS = 16  # the most prompt tokens that may wait, in contexts of the model


class PrefillService(Service[PrefillEngine]):
    """Serves POST /prefill, POST /generate and POST /score with one EmittingEngine or SendingEngine."""

    role = "prefill"

    def __init__(self, fleet: Fleet, host: Host, make_engine: Callable[[], PrefillEngine]) -> None:
        context = fleet.models[host.model].context
        policy = Policy(host.engine.chunk_tokens, host.engine.prompts_kv_bytes, QUEUE_CONTEXTS * context)
        super().__init__(fleet, host, Admission(policy.started, host.queue_size), make_engine)
        self.scheduler = Scheduler(policy, self.progress.beat)
        self._rates = MeasuredRates()
        self._receivers = Receivers(fleet, host)

    def figures(self) -> Figures:
        return Figures(
            kv_bytes=self.scheduler.kv_bytes,
            kv_limit=self.scheduler.policy.kv_bytes,
            kv_held_bytes=self._engine.held_bytes if self._engine else 0,
            queue_tokens=self.scheduler.tokens_ahead,
            prefill_tokens_s=self.scheduler.tokens_s,
            prefill_speeds=self._rates.speeds,
            links=self._rates.links(),
        )

    @property
    def kv_version(self) -> int:
        """Only what an engine emits is sent in chunks: one that sends by itself knows the version before."""
        return KV_WHOLE if isinstance(self._engine, SendingEngine) else KV_CHUNKS

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def engine_alive(self) -> bool:
        return self.scheduler.alive and (self._engine is None or self._engine.alive)

    @property
    def engine_failure(self) -> str:
        return self._engine.failure if self._engine else ""

    @property
    def queue_s(self) -> float:
        return self.scheduler.queue_s

    async def probe_engine(self) -> None:
        job = PromptJob("probe", 2, 0, self.engine.probe)
        self.scheduler.submit(job)
        try:
            await asyncio.wrap_future(job.computed)
        finally:
            self.scheduler.release(job)

    @property
    def test_limit_s(self) -> float:
        return self.engine.test_limit_s or super().test_limit_s

    async def load(self) -> None:
        self._engine = await on_daemon_thread(self._prepare, "load")
        if self._engine.info.backend.endswith("/cpu"):
            self.scheduler.policy = replace(self.scheduler.policy, **ON_CPU)
        limit = self.scheduler.policy.kv_bytes
        kv_bytes = min(limit, self._engine.info.kv_bytes or limit)
        self.scheduler.policy = replace(self.scheduler.policy, together=self._engine.together, kv_bytes=kv_bytes)
        self.state = "ok"

    async def close(self) -> None:
        await asyncio.to_thread(self.scheduler.close)
        await super().close()

    def endpoints(self) -> Sequence[ServiceCall[Any]]:
        return [
            ServiceCall("/prefill", PrefillBody, self._prefill),
            ServiceCall("/generate", GenerateBody, self._generate),
            ServiceCall("/score", ScoreBody, self._score),
        ]

    async def _prefill(self, body: PrefillBody, caller: Caller) -> AsyncGenerator[Event, None]:
        """POST /prefill: one closing event, with what the prefill and its transfer took."""
        self._receivers.require(body.deliver)
        async with self.admitted(body, caller, ONE_TOKEN) as request:
            shipped = await self._ship(request, body)
            logs.info("prefilled", **shipped.to_json())
            yield shipped

    async def _ship(self, request: ActiveRequest, body: PrefillBody) -> ShippedEvent:
        """Compute while sending, and let the rest of the transfer drain while other prompts are computed."""
        to, header = (body.deliver.host, body.deliver.port), self._header(request, body)
        delivery = delivery_by(self.engine)(
            self.engine,
            request.tokens,
            to,
            header,
            deadline=request.deadline,
            salt=body.cache_salt,
            beats=lambda: self.progress.beats,
        )
        request.cleanup.callback(delivery.end)
        layers = self._share_of_layers(header.layers)
        job = PromptJob(
            request.id,
            header.tokens,
            header.layout.nbytes(header.tokens),
            self._beginning(request, "computing the prompt", delivery.start),
            to=to,
            queued_bytes=delivery.queued_bytes,
            starved=delivery.starved,
            layers=layers,
            share=request.share,
        )
        run = await self._computed(request, job, "computing the prompt")
        timing = run.timing
        request.computed()
        request.enter("sending KV")
        sent = await on_daemon_thread(partial(delivery.finish, timing, job.waits), f"kv-finish-{request.id}")
        timing = run.timing  # an engine that sends by itself knows only now when the rows were computed
        self.count(computed_prompt_tokens=timing.tokens, kv_bytes_total=sent.payload_bytes)
        self._rates.add(to, timing, sent, layers)
        return ShippedEvent(
            prompt_tokens=request.prompt_tokens,
            computed_tokens=timing.tokens,
            held_tokens=run.held,
            kv_bytes=sent.payload_bytes,
            kv_wire=header.wire,
            tokenise_s=request.tokenise_s,
            queue_s=timing.ended - request.tokenised - timing.compute_s - sent.waited_s - job.starved_s,
            compute_s=timing.compute_s,
            hidden_transfer_s=sent.hidden_s,
            exposed_transfer_s=sent.exposed_s,
            starved_s=job.starved_s,
            layers=header.layers,
        )

    async def _computed(self, request: ActiveRequest, job: PromptJob, phase: Phase) -> PrefillRun:
        """The job's run after its last step. phase: the request's, from the first step on."""
        self.scheduler.submit(job)
        request.cleanup.callback(self.scheduler.release, job)
        await request.within_deadline(asyncio.wrap_future(job.started), "the prompt's turn had not come")
        self._admission.start(request.share, request.cleanup)
        request.enter(phase)
        return await request.within_deadline(asyncio.wrap_future(job.computed), "the prompt was not computed")

    def _beginning(
        self, request: ActiveRequest, phase: Phase, start: Callable[[], PrefillRun]
    ) -> Callable[[], PrefillRun]:
        """`start`, with the phase noted down and stated just before, on the engine's thread: the process may end
        there."""
        caller, loop = self.active[request.key], asyncio.get_running_loop()

        def begin() -> PrefillRun:
            request.enter(phase)
            if caller.stated == "queued":
                with suppress(TimeoutError, CancelledError):  # a caller that does not read, or has gone
                    asyncio.run_coroutine_threadsafe(caller.state_begin(), loop).result(2 * STATE_S)
            return start()

        return begin

    def _header(self, request: ActiveRequest, body: PrefillBody) -> Header:
        info, layers = self.engine.info, self._layers(body)
        if body.start >= len(request.tokens):
            raise RequestError(
                f"start: {body.start} is not within the {len(request.tokens)} tokens of the prompt",
                "give the slot's held_tokens",
            )
        layout = info.split.head(info.layout, layers or info.split.layers)
        return Header(
            ticket=body.ticket,
            request_id=request.id,
            fingerprint=info.fingerprint,
            layout=layout,
            token_hash=token_hash(request.tokens),
            tokens=len(request.tokens) - 1,
            start=body.start,
            wire=body.kv_wire or self._wire_form(len(request.tokens) - 1, body.deliver, layout, layers),
            sender=self.host.name,
            weights=info.weights,
            layers=layers,
            hidden=info.split.hidden if layers else 0,
            chunks=self._in_chunks(body),
        )

    def _layers(self, body: PrefillBody) -> int | None:
        """How many of the model's layers are to be computed, None for all. RequestError if this host does not compute
        these, or does not send them so."""
        info, hint = self.engine.info, "give the slot's layers and kv_version"
        if refusal := info.cannot_compute(body.layers):
            raise RequestError(f"layers: {refusal}", hint)
        layers = body.layers if body.layers != info.split.layers else None
        if layers is not None and not self._in_chunks(body):
            version = min(body.kv_version, self.kv_version)
            raise RequestError(f"layers: by version {version} of the KV protocol all are sent, not {layers}", hint)
        return layers

    def _in_chunks(self, body: PrefillBody) -> bool:
        """Whether the KV is sent in chunks: a slot for these takes KV that is not, too."""
        return min(body.kv_version, self.kv_version) >= KV_CHUNKS

    def _share_of_layers(self, layers: int | None) -> float:
        """Of the model's layers, that the first `layers` are; None: all."""
        return 1.0 if layers is None else layers / self.engine.info.split.layers

    def _wire_form(self, tokens: int, to: KVAddress, layout: Layout, layers: int | None) -> WireForm:
        """The form in which the KV of `tokens` tokens is sent, of these layers. Logged with its reasons if hosts.toml
        leaves the choice."""
        wanted = self.host.engine.kv_wire
        rates = self._rates.rates((to.host, to.port))
        wire = choose_form(wanted, layout, tokens, rates, self._share_of_layers(layers))
        if wanted == "auto":
            logs.info("kv_wire", chosen=wire, tokens_per_s=rates.tokens_s, link_bytes_per_s=rates.link_bytes_s)
        return wire

    def _require_all_layers(self) -> None:
        """CapabilityMissing if this host has loaded the first layers only, and answers nothing."""
        if refusal := self.engine.info.cannot_compute(None):
            raise CapabilityMissing(
                f"{self.host.name} cannot answer alone: {refusal}", "ask another host of this model"
            )

    async def _generate(self, body: GenerateBody, caller: Caller) -> AsyncGenerator[Event, None]:
        """POST /generate: prompt and answer on this host. The engine does not wait for whoever reads the answer."""
        self._require_all_layers()
        async with self.admitted(body, caller, body.sampling) as request:
            answer = await begin_answer(request, self.engine, body, self.work)
            if answer.finish_reason is None:
                async with aclosing(self._answer(request, body, answer)) as events:
                    async for event in events:
                        yield event
            yield self._done(request, answer)

    async def _score(self, body: ScoreBody, caller: Caller) -> AsyncGenerator[Event, None]:
        """POST /score: a job of the scheduler, whose KV is nobody else's."""
        self._require_all_layers()
        async with self.admitted(body, caller, ONE_TOKEN) as request:
            tokens = request.tokens
            scores = PromptScores(tokens, body.top, self.engine.tokenizer.token_bytes)
            start = partial(self.engine.start_scores, tokens, body.top, scores.add)
            begin = self._beginning(request, "computing the prompt", start)
            kv_bytes = self.engine.info.layout.nbytes(len(tokens) - 1)
            job = PromptJob(request.id, len(tokens) - 1, kv_bytes, begin, share=request.share, scored=True)
            timing = (await self._computed(request, job, "computing the prompt")).timing
            self.scheduler.release(job)
            request.computed()
            self.count(computed_prompt_tokens=timing.tokens)
            for event in scores.events():
                yield event
            scored = ScoredEvent(
                prompt_tokens=len(tokens),
                tokenise_s=request.tokenise_s,
                queue_s=timing.ended - request.tokenised - timing.compute_s,
                compute_s=timing.compute_s,
            )
            logs.info("scored", **scored.to_json())
            yield scored

    async def _answer(
        self, request: ActiveRequest, body: GenerateBody, answer: GrowingAnswer
    ) -> AsyncGenerator[Event, None]:
        """The events of the answer until it is finished."""
        feed = TokenFeed(TokenBridge(), request.deadline)
        request.cleanup.callback(feed.close)
        computing = asyncio.ensure_future(self._generate_tokens(request, body, feed))
        try:
            first = await feed.steps()
            request.computed()
            for event in answer.add(first):
                yield event
            async with aclosing(rest_of(answer, feed, answer.add, self.active[request.key].send_now)) as rest:
                async for event in rest:
                    yield event
        finally:
            computing.cancel()
            await asyncio.wait((computing,))

    def _done(self, request: ActiveRequest, answer: GrowingAnswer) -> DoneEvent:
        """The end of an answer that is finished."""
        assert answer.finish_reason is not None
        timing = answer.timing
        computed = timing.computed_prompt_tokens
        self.count(completion_tokens=answer.generated_tokens, computed_prompt_tokens=computed)
        turn_s = max(0.0, timing.submitted - request.tokenised)
        done = DoneEvent(
            finish_reason=answer.finish_reason,
            stop=answer.stop,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            computed_prompt_tokens=computed,
            held_tokens=min(len(request.tokens) - computed, request.prompt_tokens) if computed else 0,
            timing=request.timing(turn_s, timing, None, answer.decode_s),
            simulated=self.host.simulated,
            reasoning_tokens=answer.reasoning_tokens,
        )
        logs.info("generated", **done.figures)
        return done

    async def _generate_tokens(self, request: ActiveRequest, body: GenerateBody, feed: TokenFeed) -> None:
        """Pass the answer's tokens, or the error that ended it, to `feed`."""
        timing = DecodeTiming(submitted=time.monotonic())
        runs: list[PrefillRun] = []

        def emit(token: Token) -> None:
            if not timing.first_token:
                _note(timing, runs[0].timing)
            feed.on_tokens((token,), timing)
            feed.flush()

        def start() -> PrefillRun:
            whole = AnswerRequest(
                request.tokens,
                request.sampling,
                request.answered,
                body.cache_salt,
                request.constraint,
                request.bad_words,
            )
            runs.append(self.engine.start_answer(whole, emit))
            return runs[0]

        total = request.prompt_tokens + request.sampling.max_tokens
        kv_bytes = self.engine.info.layout.nbytes(total)
        begin = self._beginning(request, "generating", start)
        job = PromptJob(request.id, len(request.tokens) - 1, kv_bytes, begin, share=request.share)
        try:
            await self._computed(request, job, "generating")
        except Exception as error:  # noqa: BLE001 - `feed.steps` raises it
            feed.on_error(error)


def _note(timing: DecodeTiming, prompt: PrefillTiming) -> None:
    """Fill in a request's timing when it has its first token: what was not spent on its prompt, it waited."""
    timing.started = timing.ingested = prompt.ended - prompt.compute_s
    timing.first_token = prompt.ended
    timing.computed_prompt_tokens = prompt.tokens
