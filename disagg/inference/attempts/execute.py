"""Runs one request: performs the attempts of the retry policy, one after the other, until the answer is complete.

Everything here is a plain coroutine. Chunks leave by a callback as soon as their event has been read from the socket,
so that their times are those of arrival, and a slow caller does not delay reading.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from disagg.api.events import SlotEvent
from disagg.api.names import KV_CHUNKS
from disagg.api.requests import DecodeBody, PrefillOffer
from disagg.config import Host
from disagg.errors import DeadlineExceeded, DisaggError
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import FALLBACK_WARNING, ArrivingAnswer, AttemptOutcome, Deliver
from disagg.inference.attempts.caller import HostCaller, PrefillFailed
from disagg.inference.attempts.driver import (
    FIRST_LOADS_S,
    Driver,
    GenerationRequest,
    may_be_divided,
    ranking,
    routed,
)
from disagg.inference.attempts.perform import perform, perform_whole
from disagg.inference.attempts.plausible import AnswerBounds
from disagg.inference.attempts.retry import Failure, Pause, after, forget_frames, remaining
from disagg.inference.attempts.suspects import Suspicion, may_have_ended
from disagg.inference.attempts.view_updates import ViewUpdates
from disagg.inference.attempts.waiting import Waiting
from disagg.inference.attempts.waking import Waker, was_unloaded
from disagg.inference.hosts.affinity import RoutedPrompt, chain, content_of, prompt_of
from disagg.inference.hosts.route import Ranking, can_go_on, offer_of, unknown
from disagg.inference.http.host_calls import WholeCall
from disagg.inference.policy import longest_wait_s
from disagg.inference.types import Completion, Stage, Watch, unwatched
from disagg.whole.request import openai_request

log = logging.getLogger(__name__)


async def run(
    driver: Driver, request: GenerationRequest, deliver: Deliver, watch: Watch = unwatched, request_id: str = ""
) -> Completion:
    """The whole answer; `deliver` gets each chunk when it arrives, `watch` each stage that the request comes to.

    Ends by the request's deadline. Raises a DisaggError, which has what had arrived of the answer.
    """
    hosts, prompt = request.candidates, prompt_of(request.body)

    def watched(stage: Stage) -> None:
        received = stage.phase == "decode" and stage.method == "disaggregated"
        if received and stage.decode_server and request.body.hold_prompt:  # the answers that follow begin now
            tokens = stage.prompt_tokens or prompt.tokens
            driver.view.affinity.remember(prompt.chain, stage.decode_server, tokens, len(prompt.content))
        watch(stage)

    answer = ArrivingAnswer(hosts.model, request.called, deliver, watched, request_id)
    waiting = Waiting(request.policy.timeouts, answer.note, driver.http.closed)
    suspicion = Suspicion(driver.suspects, request.body, request.policy)
    try:
        async with asyncio.timeout(request.body.deadline_s), AsyncExitStack() as loads:
            one = _Run(driver, request, answer, waiting, prompt, suspicion, loads)
            with driver.refresher.using(hosts.all):
                try:
                    return await one.to_end()
                finally:
                    one.give_up_claim()
    except TimeoutError:
        error = waiting.error or DeadlineExceeded(
            f"no full answer within {request.body.deadline_s:g} s", "raise the timeout, or see `disagg status`"
        )
        error.partial = answer.partial
        raise error from None
    except DisaggError as error:
        error.partial = answer.partial
        raise
    finally:
        suspicion.end_turn()


@dataclass(slots=True)
class _Run:
    """One request on its way."""

    driver: Driver
    request: GenerationRequest
    answer: ArrivingAnswer
    waiting: Waiting
    prompt: RoutedPrompt
    suspicion: Suspicion
    stack: AsyncExitStack  # the loads that the request waits for
    waker: Waker = field(init=False)
    failures: list[Failure] = field(default_factory=list)  # of earlier looks at the fleet
    first: bool = True  # nothing was tried or waited for yet
    last_look: bool = False  # the time for a host to come up is over, and all were asked once more
    claimed: tuple[str, float] | None = None  # a host with a place for the next attempt; see FleetView.began

    def __post_init__(self) -> None:
        answer, alone = self.answer, self.request.may_answer_alone
        self.waker = Waker(self.driver.loads, self.stack, alone, self._elsewhere, answer.note, answer.waits_for_load)

    async def to_end(self) -> Completion:
        """Look at the fleet and perform the attempts that this gives, until one completes the answer."""
        await self._read_unknown()
        while True:
            failures: list[Failure] = []
            await self.suspicion.take_turn(self.answer.note)
            ranked, untried = self._look(failures)
            while (attempt := next(untried, None)) is not None:
                self._announce(attempt, failures, started=self.answer.begun or not ranked.unseen)
                before = len(failures)
                if (awake := await self._wake(attempt, failures)) is not None:
                    outcome = await self._try(awake, ranked, failures)
                    if outcome is not None:
                        return self._complete(awake, outcome, failures)
                waited = await self.suspicion.take_turn(self.answer.note)
                # It may have waited for long: other hosts may have room now. Or its model has been unloaded.
                if waited or len(failures) == before or failures[-1].busy:
                    ranked, untried = self._look(failures)
            pause = after(ranked, self.request.policy, failures, self.failures)
            self.failures = [*self.failures, *failures][-8:]
            self.first = False
            self.suspicion.end_turn()
            await self._pause(pause, {failure.host.name for failure in failures if failure.busy})

    async def _read_unknown(self) -> None:
        """Read the loads of hosts that this client has not asked yet: else its first prompts would be handed off
        whole. And what keepers state, if it was not asked for lately and no host has the model ready, to choose which
        one is to load it."""
        view, hosts = self.driver.view, self.request.candidates
        if stale := self.driver.refresher.stale(hosts.all):
            ranked = ranking(view, self.request, self.prompt)
            best = [choices[0].host for choices in (ranked.decode, ranked.prefill) if choices]
            known = len(best) == bool(hosts.decode) + bool(hosts.prefill)
            if not known or any(view.of(host.name).must_load for host in best):
                await self.driver.refresher.read(stale, FIRST_LOADS_S)
        if may_be_divided(self.request, self.prompt):
            seen = routed(view, self.request, self.prompt)
            await self.driver.refresher.read(unknown(view, seen, time.monotonic(), self.request.start), FIRST_LOADS_S)

    async def _wake(self, attempt: Attempt, failures: list[Failure]) -> Attempt | None:
        """The attempt once its models are loaded. A load that fails is noted and gives None."""
        view, request = self.driver.view, self.request
        if not any(view.of(host.name).must_load for host in attempt.hosts):
            return attempt
        self.waiting.error = DeadlineExceeded(
            f"{request.candidates.model} was still being loaded after {request.body.deadline_s:g} s",
            "raise the timeout, or load it before: `disagg models load`",
        )
        try:
            awake = await self.waker.ready(
                attempt, routed(view, request, self.prompt), self.deadline - time.monotonic()
            )
        except PrefillFailed as failed:
            failure = Failure(attempt, "prefill", failed.error, self.answer.begun)
        except DisaggError as error:
            failure = Failure(attempt, "decode" if attempt.decode else "prefill", error, self.answer.begun)
        else:
            self._woken()
            if may_be_divided(request, self.prompt):
                await self.driver.refresher.read(awake.hosts, FIRST_LOADS_S)
            return awake
        self._woken()
        self.driver.http.require_open()
        ViewUpdates(view, attempt, self.prompt.tokens, request.body.share).ended(failure, None)
        forget_frames(failure.error)
        failures.append(failure)
        return None

    def _woken(self) -> None:
        """The wait for a load is over."""
        self.waiting.error = None
        self.answer.loading_s = time.monotonic() - self.request.called if self.first else self.waker.waited_s

    @property
    def deadline(self) -> float:
        return self.request.called + self.request.body.deadline_s

    def _look(self, failures: list[Failure]) -> tuple[Ranking, Iterator[Attempt]]:
        """The hosts as the view sees them now, and the attempts that these failures and later ones leave."""
        self.give_up_claim()
        self.suspicion.look()
        ranked = ranking(self.driver.view, self.request, self.prompt, last_look=self.last_look)
        return ranked, remaining(ranked, self.request.policy, failures, begun=self.answer.begun)

    async def _pause(self, pause: Pause, busy: Collection[str]) -> None:
        """busy: the hosts at which a place is waited for."""
        self.driver.http.require_open()
        seconds = min(pause.seconds * random.uniform(0.75, 1.25), longest_wait_s(self.deadline - time.monotonic()))
        if not pause.limited:
            seconds += self.driver.budget.delay(time.monotonic())
        if pause.limited and self.last_look:
            raise pause.error
        share, places = self.request.body.share, self.driver.view.places
        with places.waiting(busy, share, self.request.called, self.waiting.woken.set):
            waited = await self.waiting.wait(pause, seconds)
        self.driver.http.require_open()
        if not waited:
            await self._look_once_more(pause)

    async def _look_once_more(self, pause: Pause) -> None:
        """Ask every host before the request fails because none is up. What the view has may be out of date, as after
        this process was stopped for a while."""
        self.last_look = True
        self.waiting.error = pause.error
        await self.driver.refresher.read(self.request.candidates.all, self.request.policy.timeouts.silence)
        self.waiting.error = None

    async def _try(self, attempt: Attempt, ranked: Ranking, failures: list[Failure]) -> AttemptOutcome | None:
        """Perform an attempt. A failure that others may follow is noted and gives None; so does a host that had its
        model unloaded before the request came, which is no failure."""
        log.debug("attempt: %s", attempt)
        view = self.driver.view
        updates = ViewUpdates(
            view, attempt, self.prompt.tokens, self.request.body.share, self.suspicion.prompt_computed
        )
        caller = self._caller(updates, {failure.host.name for failure in failures})

        def first_token() -> None:
            updates.first_token()
            if attempt.method == "whole":  # a server of another kind: its token says nothing of the hosts
                self.suspicion.end_turn()
            else:
                self.suspicion.cleared()

        first = self.first and not self.answer.loading_s
        self.answer.begin(attempt, self.request.called if first else time.monotonic(), first_token)
        self.first = False
        failure, outcome, kept = None, None, {host.name: view.of(host.name).kept for host in attempt.hosts}
        try:
            try:
                outcome = await self._perform(attempt, ranked, caller, updates)
                return outcome
            except PrefillFailed as failed:
                failure = Failure(attempt, "prefill", failed.error, self.answer.begun)
            except DisaggError as error:
                failure = Failure(attempt, "decode" if attempt.decode else "prefill", error, self.answer.begun)
            if (before := kept[failure.host.name]) is not None:
                call = caller.sent.get(failure.host.name)
                sent = call is not None and call.written > 0
                if await was_unloaded(self.driver.refresher, view, failure.host, failure.error, before, sent=sent):
                    failure = None
                    return None
        finally:
            updates.ended(failure, outcome)
        self.driver.http.require_open()  # closing the client under a request looks like a lost connection
        if failure.final:
            raise failure.error
        has_token = self.answer.trace.first_token > 0
        ended = may_have_ended(failure, caller.sent.values(), updates.starts, has_token=has_token)
        await self.suspicion.broke_off(ended, failure.error)
        forget_frames(failure.error)
        failures.append(failure)
        return None

    def _caller(self, updates: ViewUpdates, failed: Collection[str]) -> HostCaller:
        """failed: the hosts that have failed since the last pause."""
        return HostCaller(
            self.driver.http,
            self.driver.heartbeat,
            self.request.policy.timeouts,
            self.deadline,
            self._elsewhere,
            partial(self._claim, failed),
            updates,
            self.request.policy.on_kv_failure,
            self._divides,
            self._next_head,
        )

    async def _perform(
        self, attempt: Attempt, ranked: Ranking, caller: HostCaller, updates: ViewUpdates
    ) -> AttemptOutcome:
        if attempt.method == "whole":
            host, body = attempt.answering, self.request.body
            asked = openai_request(body, host.engine.model or body.model, self.request.candidates.context)
            call = WholeCall(host, asked, caller.waits(host), self.request.via)
            return await perform_whole(self.driver.http, call, self.answer)
        for taking in (attempt.decode, attempt.prefill):
            if taking is not None and (full := updates.take_place(taking)) is not None:
                raise PrefillFailed(full) if taking is not attempt.answering else full
        body = self.answer.body(self.request.body, max(0.001, caller.left_s), caller.timeouts.lease)
        if standing := self.suspicion.standing:
            body = msgspec.structs.replace(body, standing=standing)
        self.answer.bounds = self._bounds(attempt)
        if attempt.method == "disaggregated" and attempt.prefill is not None:
            first = attempt.decode == ranked.decode[0].host and attempt.prefill == ranked.prefill[0].host
            body = DecodeBody(
                **msgspec.structs.asdict(body),
                prefill=self._offer(attempt, ranked, alone=first and self.request.policy.local_prefill),
                elsewhere_s=ranked.elsewhere_s(attempt.prefill, self.driver.view),
                audit=self.driver.view.of(attempt.prefill.name).breaker.refuted,
                sender=attempt.prefill.name,
            )
        return await perform(caller, attempt, body, self.answer)

    def _offer(self, attempt: Attempt, ranked: Ranking, *, alone: bool) -> PrefillOffer | None:
        """The attempt's prefill host, for its decode host. alone: that may compute all of the prompt itself."""
        choice = next((choice for choice in ranked.prefill if choice.host == attempt.prefill), None)
        if choice is None or attempt.decode is None:
            return None
        return offer_of(self.driver.view, choice, attempt.decode, alone=alone)

    def _divides(self, host: Host) -> bool:
        """Whether a host is of a version that divides prompts, as far as is known."""
        load = self.driver.view.of(host.name).load
        return load is None or load.kv_version >= KV_CHUNKS

    def _next_head(self, slot: SlotEvent, failed: Collection[str]) -> Host | None:
        """The best prefill host that can go on with a prompt whose prefill hosts `failed`; None if there is none."""
        view = self.driver.view
        ranked = ranking(view, self.request, self.prompt, last_look=self.last_look)
        hosts = (choice.host for choice in ranked.prefill if choice.host.name not in failed)
        return next((host for host in hosts if can_go_on(view, host, slot)), None)

    def _bounds(self, attempt: Attempt) -> AnswerBounds:
        """What this attempt's host may send."""
        body, hosts = self.request.body, self.request.candidates
        name = attempt.answering.name
        return AnswerBounds(
            name,
            body.sampling.max_tokens,
            self.driver.view.vocab_size(name, [host.name for host in hosts.all]),
            given=len(self.answer.tokens),
            stops=body.sampling.stop,
            prompt_tokens=len(body.tokens or ()),
        )

    def _elsewhere(self, host: Host) -> bool:
        """Whether another host of this one's role gets requests now."""
        hosts, view, now = self.request.candidates, self.driver.view, time.monotonic()
        roles = (hosts.decode, hosts.prefill, hosts.whole)
        role = next(role for role in roles if any(one.name == host.name for one in role))
        return any(not view.obstacle(other, now) for other in role if other.name != host.name)

    def _claim(self, failed: Collection[str], host: Host) -> bool:
        """Take a free place at another host of this one's role until the next look, so that no other request leaves its
        queue for the same one. False if no host that the next attempt would use has any."""
        hosts, view = self.request.candidates, self.driver.view
        ranked = ranking(view, self.request, self.prompt, last_look=self.last_look)
        choices = ranked.decode if any(one.name == host.name for one in hosts.decode) else ranked.prefill
        others = (choice.host.name for choice in choices if choice.host != host and choice.host.name not in failed)
        name = next((other for other in others if view.of(other).has_room), None)
        if name is None:
            return False
        self.claimed = name, view.began(name, self.prompt.tokens)
        return True

    def give_up_claim(self) -> None:
        """Whatever place was claimed is free again."""
        if self.claimed is not None:
            view, (name, ejection) = self.driver.view, self.claimed
            view.ended(name, self.prompt.tokens, view.of(name).breaker.ended(ejection))
            self.claimed = None

    def _announce(self, attempt: Attempt, failures: list[Failure], *, started: bool) -> None:
        """Note for the caller if the answer goes on on another host, or on one that is not meant for it. started: some
        host has answered this client; if none has, perhaps none will, and the error alone is to be shown."""
        note = self.answer.note if started else self.answer.note_with_answer
        failed = [failure for failure in (*self.failures, *failures) if failure.answering and not failure.busy]
        count = len(self.answer.tokens)
        if count and failed:
            note(
                f"{failed[-1].host.name} failed after {count} tokens ({failed[-1].error.message}): "
                f"the answer goes on on {attempt.answering.name}"
            )
        elif failed and failed[-1].host != attempt.answering:
            note(f"{failed[-1].error.message}: asking {attempt.answering.name}")
        if attempt.method in ("whole", "prefill-alone") and not self.request.candidates.alone:
            note(f"{FALLBACK_WARNING}: no decode host is up, asking {attempt.answering.name} to answer alone")

    def _complete(self, attempt: Attempt, outcome: AttemptOutcome, failures: list[Failure]) -> Completion:
        """The completion. Records in the view what the hosts hold now and how large KV is."""
        view, hosts, body = self.driver.view, self.request.candidates, self.request.body
        done, shipped = outcome.done, outcome.shipped
        if shipped is not None and shipped.kv_bytes and shipped.prompt_tokens > done.held_tokens:
            view.kv_bytes_per_token[hosts.model] = shipped.kv_bytes / (shipped.prompt_tokens - done.held_tokens)
        warnings = outcome.warnings
        if attempt.method == "fallback":
            causes = [failure.error for failure in failures if failure.side == "prefill"]
            cause = str(causes[-1]) if causes else f"no prefill host of {hosts.model} is up"
            warnings = (*warnings, f"{FALLBACK_WARNING}: {cause}")
        completion = self.answer.completion(outcome._replace(warnings=warnings))
        if attempt.decode is not None and not attempt.decode.whole:
            content = content_of(body, completion.text, [token.id for token in completion.tokens])
            hashes = chain(content, f"{body.model}\0{body.cache_salt}")
            view.affinity.remember(hashes, attempt.decode.name, completion.metrics.total_tokens, len(content))
        return completion
