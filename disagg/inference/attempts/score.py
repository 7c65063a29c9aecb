"""What a model gives the tokens of a prompt: POST /score of one host. A prefill host is asked first, since that is what
it is fast at; a decode host if there is none that can."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence

from disagg.api.events import DoneEvent, Event, PromptToken, ScoredEvent, ScoresEvent, Timing
from disagg.api.requests import ScoreBody
from disagg.config import Host
from disagg.errors import CapabilityMissing, DeadlineExceeded, DisaggError, InvalidAnswer, Overloaded
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import AttemptOutcome, phase_of, stage_of
from disagg.inference.attempts.driver import FIRST_LOADS_S, Driver, GenerationRequest
from disagg.inference.attempts.question import Asking, Question
from disagg.inference.attempts.retry import Failure
from disagg.inference.attempts.view_updates import ViewUpdates
from disagg.inference.hosts.affinity import prompt_of
from disagg.inference.http import host_calls
from disagg.inference.http.host_calls import EventCall
from disagg.inference.metrics import Trace, metrics
from disagg.inference.types import PromptScores, Watch, unwatched


async def score(
    driver: Driver, request: GenerationRequest, top: int, watch: Watch = unwatched, request_id: str = ""
) -> PromptScores:
    """The scores of the request's prompt. Waits while no host answers and one is busy.

    Raises what `Question.to_one_of` raises, and DeadlineExceeded.
    """
    hosts, body = request.candidates, ScoreBody(**request.body.of_prompt, top=top)
    scoring = Question(driver, request, body, _Ask(driver, request, watch, request_id), waits=True)
    unable = CapabilityMissing(
        f"no host of {body.model} scores prompts: whole-request hosts have no call for it",
        "give the model a prefill or a decode host",
    )
    try:
        async with asyncio.timeout(body.deadline_s):
            with driver.refresher.using(hosts.all):
                await driver.refresher.read(driver.refresher.stale(hosts.all), FIRST_LOADS_S)
                while True:
                    try:
                        return await scoring.to_one_of(_ranked(driver, request), unable)
                    except Overloaded as error:
                        scoring.failure = None
                        await asyncio.sleep(error.retry_after_s * random.uniform(0.5, 1.0))
    except TimeoutError:
        raise DeadlineExceeded("no host has scored the prompt", "raise the timeout") from scoring.failure
    finally:
        scoring.suspicion.end_turn()


def _ranked(driver: Driver, request: GenerationRequest) -> Sequence[Host]:
    """Its hosts, the best one first."""
    now, view, hosts = time.monotonic(), driver.view, request.candidates
    ranked = [*hosts.prefill, *hosts.decode]
    return sorted(
        ranked,
        key=lambda host: (*view.until_begun(host, now), host in hosts.decode, view.of(host.name).ahead),
    )


class _Ask:
    """Asks one host."""

    def __init__(self, driver: Driver, request: GenerationRequest, watch: Watch, request_id: str) -> None:
        self._driver, self._request, self._watch, self._request_id = driver, request, watch, request_id
        self._tokens = prompt_of(request.body).tokens

    async def __call__(self, asking: Asking[ScoreBody]) -> PromptScores:
        request, host = self._request, asking.host
        decodes = "decode" in host.roles
        attempt = Attempt("decode-alone", host, None) if decodes else Attempt("prefill-alone", None, host)
        updates = ViewUpdates(self._driver.view, attempt, self._tokens, request.body.share)
        failure, outcome = None, None
        try:
            if (full := updates.take_place(host)) is not None:
                raise full
            scores, outcome = await self._scores(asking, attempt)
            return scores
        except DisaggError as error:
            failure = Failure(attempt, "decode" if decodes else "prefill", error)
            raise
        finally:
            updates.ended(failure, outcome)

    async def _scores(self, asking: Asking[ScoreBody], attempt: Attempt) -> tuple[PromptScores, AttemptOutcome]:
        host, request, tokens = asking.host, self._request, list[PromptToken]()
        trace = Trace(attempt, request.candidates.model, request.called, time.monotonic())
        call = EventCall(
            host, "/score", asking.body, f"{self._request_id}-{secrets.token_hex(4)}", request.policy.timeouts
        )
        call.reported = lambda phase: self._enter(attempt, phase)
        self._enter(attempt, "queued")
        context = request.candidates.context

        def take(event: Event) -> ScoredEvent | None:
            if isinstance(event, ScoresEvent):
                tokens.extend(event.tokens)
                if len(tokens) > context:
                    raise InvalidAnswer(f"{host.name} sent scores of more tokens than the context has")
            return event if isinstance(event, ScoredEvent) else None

        try:
            async with host_calls.events(self._driver.http, call) as stream:
                scored = await stream.to_end(take)
        finally:
            if call.written and call.phase != "queued":
                asking.sent.set()
        _require_fitting(host, asking.body, tokens, scored)
        trace.requested = call.written
        trace.ended(time.monotonic())
        done = DoneEvent(
            finish_reason="length",
            prompt_tokens=scored.prompt_tokens,
            completion_tokens=0,
            computed_prompt_tokens=scored.prompt_tokens - 1,
            timing=Timing(scored.tokenise_s, queue_s=scored.queue_s, compute_s=scored.compute_s),
        )
        return PromptScores(tuple(tokens), metrics(trace, done)), AttemptOutcome(done)

    def _enter(self, attempt: Attempt, reported: str) -> None:
        if (phase := phase_of(reported)) is not None:
            self._watch(stage_of(attempt, phase))


def _require_fitting(host: Host, body: ScoreBody, tokens: Sequence[PromptToken], scored: ScoredEvent) -> None:
    """Raise InvalidAnswer if what a host has sent contradicts the request or itself."""
    first, rest = tokens[:1], tokens[1:]
    wrong = (
        "another number of tokens than it states"
        if len(tokens) != scored.prompt_tokens or not first
        else "scores of other tokens than it was asked for"
        if body.tokens is not None and tuple(token.id for token in tokens) != body.tokens
        else "tokens without a score"
        if first[0].logprob is not None or any(token.logprob is None for token in rest)
        else "more alternatives than it was asked for"
        if any(len(token.top) > body.top or len(token.top) != len(token.top_bytes) for token in tokens)
        else ""
    )
    if wrong:
        raise InvalidAnswer(f"{host.name} sent {wrong}", "deploy the same version of disagg everywhere")
