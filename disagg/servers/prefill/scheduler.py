"""The thread of a prefill host that computes prompts, chunk by chunk. A short prompt does not wait for a long one
before it: `order` decides which is next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from disagg import logs
from disagg.api.layout import split_chunk
from disagg.api.requests import Share
from disagg.engines.base import PrefillRun
from disagg.engines.process import lower_priority_of_thread
from disagg.errors import Cancelled, DisaggError, ModelError, Overloaded
from disagg.kv.sent import LinkWait
from disagg.servers.prefill.order import Candidate, Policy, State, chunk, is_alone, order
from disagg.shares import Claim, Claims, Computing, within

POLL_S = 0.005  # while every prompt waits for its receiver
JOIN_S = 10.0
FIRST_TOKENS_S = 1000.0  # taken as the speed until it is measured
RATED_TOKENS = 64  # a shorter step does not show the speed
RATE_WEIGHT = 0.2  # of the newest measurement in the moving average


@dataclass(slots=True, eq=False)
class PromptJob:
    """One prompt. start: opens its run, on the scheduler's thread. tokens: of the prompt. kv_bytes: of its KV, while it
    is started. queued_bytes: KV that waits to be sent to `to`. starved: whether `to`, which computes the prompt's last
    layers, takes no more of it for now. layers: the share of the model's layers that is computed here. scored: its
    tokens are scored, in shorter chunks: its speed is not that of prompts. share: whose share of the host it counts
    for. Only the scheduler changes the rest; stepped: the number of the step that computed
    it last. waits: for the link, with all that is to be computed still to come. starved_s: seconds of being starved.

    started: done once the run is open; computed: its result is the run, once nothing is left to compute. Both get the
    error that ended the job.
    """

    request_id: str
    tokens: int
    kv_bytes: int
    start: Callable[[], PrefillRun]
    to: Hashable = None
    queued_bytes: Callable[[], int] = lambda: 0
    share: Share = field(default_factory=Share)
    starved: Callable[[], bool] = lambda: False
    layers: float = 1.0
    scored: bool = False
    started: Future[None] = field(default_factory=Future)
    computed: Future[PrefillRun] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    state: State = "waiting"
    run: PrefillRun | None = None
    stepped: int = 0
    waits: list[LinkWait] = field(default_factory=list)
    starved_s: float = 0.0
    starved_since: float | None = None
    tokens_s: float | None = None  # of its last step, in tokens of all layers
    released: bool = False

    def __post_init__(self) -> None:
        for future in (self.started, self.computed):
            future.set_running_or_notify_cancel()  # whoever waits may be cancelled, the future not

    @property
    def remaining(self) -> int:
        """Prompt tokens to compute."""
        return self.run.remaining if self.run else self.tokens

    @property
    def work(self) -> float:
        """What there is to compute, in prompt tokens of all layers."""
        return self.remaining * self.layers

    def note_starved(self, starved: bool, now: float) -> None:
        """Whether it is starved now."""
        if starved and self.starved_since is None:
            self.starved_since = now
        elif not starved and self.starved_since is not None:
            self.starved_s += now - self.starved_since
            self.starved_since = None


class Scheduler:
    """The compute thread of a prefill host. Its methods may be called from any thread. policy: may be replaced before
    the first job. on_beat: called after each step."""

    def __init__(self, policy: Policy, on_beat: Callable[[], None] = lambda: None) -> None:
        self.policy = policy
        self.on_beat = on_beat
        self._jobs: list[PromptJob] = []
        self._computing = Computing()
        self._changed = threading.Condition()
        self._closing = False
        self._steps = 0
        self._latest = float("-inf")  # when the last job arrived
        self._current: PromptJob | None = None  # is being computed
        self._tokens_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the thread has ended, for any reason."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether the thread has something to compute now. Waiting for receivers is no work."""
        with self._changed:
            return self._current is not None or bool(self._order())

    @property
    def kv_bytes(self) -> int:
        """KV of the prompts that are computed or sent."""
        with self._changed:
            held = [job for job in self._jobs if job.state != "waiting" and (not job.released or job is self._current)]
            return sum(job.kv_bytes for job in held)

    @property
    def tokens(self) -> int:
        """Prompt tokens that are not computed yet, in tokens of all layers."""
        with self._changed:
            return round(sum(job.work for job in self._jobs if job.state != "computed"))

    @property
    def tokens_ahead(self) -> int:
        """Those of them that may be computed before a prompt that comes now: starved ones leave it the thread."""
        with self._changed:
            ahead = [job for job in self._jobs if job.state != "computed" and job.starved_since is None]
            return round(sum(job.work for job in ahead))

    @property
    def tokens_s(self) -> float | None:
        """Prompt tokens of all layers per second of computing, measured lately; None if not measured."""
        return self._tokens_s

    @property
    def queue_s(self) -> float:
        """Seconds until the prompt tokens that wait are computed."""
        return self.tokens_ahead / (self._tokens_s or FIRST_TOKENS_S)

    def submit(self, job: PromptJob) -> None:
        """Queue a job until `release`. Overloaded if too many tokens wait, unless those of its key are within its share
        of the bound: at most twice as many wait. ModelError if the thread has ended."""
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise ModelError("the engine's thread has ended", "see the server's log, then `disagg restart`")
            waiting, bound = self.tokens, self.policy.queue_tokens
            full = waiting and waiting + job.work > bound
            if full and not within(self._waiting_tokens(job), job.share.key, bound, round(job.work)):
                raise Overloaded(
                    f"{waiting} prompt tokens wait to be computed, and {job.tokens} more are too many",
                    "try again in a moment, or add a prefill host for this model",
                )
            self._jobs.append(job)
            self._latest = job.arrived
            self._changed.notify()

    def release(self, job: PromptJob) -> None:
        """End a job at any stage and let go of its KV. Does not wait for a step that is under way."""
        with self._changed:
            job.released = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the step that it is in; what is left ends with Cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        """Compute jobs until the scheduler is closed, on its thread. However that ends, nobody is left waiting."""
        error: DisaggError = ModelError("the engine's thread has ended", "see the server's log, then `disagg restart`")
        try:
            while (job := self._next()) is not None:
                if self.policy.yields:
                    lower_priority_of_thread()
                self._step(job)
            error = Cancelled("the server is closing")
        except BaseException:  # noqa: BLE001 - the thread ends, and its reason is in the log
            logs.log.exception("engine_thread_ended")
        with self._changed:
            self._closing, self._current = True, None
            left, self._jobs = self._jobs, []
        for job in left:
            self._end(job, error)

    def _next(self) -> PromptJob | None:
        """The job to work on, now `_current`; None at the end. Waits until there is one."""
        while not self._closing:
            with self._changed:
                self._current = None
                released = [job for job in self._jobs if job.released]
                self._jobs = [job for job in self._jobs if not job.released]
                if not released:
                    if ranked := self._order():
                        self._current = ranked[0]
                        return ranked[0]
                    self._wait()
            for job in released:
                self._end(job, Cancelled("the request was cancelled while its prompt was computed"))
        return None

    def _wait(self) -> None:
        """Wait for a change. Started prompts wait for their receivers, which their transfers watch."""
        behind = any(job.state == "started" for job in self._jobs)
        if behind:
            self.on_beat()
        self._changed.wait(POLL_S if behind else None)

    def _keys(self, *more: PromptJob) -> Claims:
        """The seconds of computing that each key has had lately. Those of all jobs, and of `more`, are among them."""
        now = time.monotonic()
        for job in (*self._jobs, *more):
            self._computing.see(job.share, now)
        return self._computing.claims(now)

    def _waiting_tokens(self, job: PromptJob) -> Claims:
        """The tokens of each key that are not computed yet, before this job comes."""
        waiting = Counter[str]()
        for one in self._jobs:
            waiting[one.share.key] += round(one.work) if one.state != "computed" else 0
        return {key: Claim(claim.weight, waiting[key]) for key, claim in self._keys(job).items()}

    def _order(self) -> list[PromptJob]:
        """The jobs that may be computed now, the next one first."""
        now = time.monotonic()
        candidates = [
            Candidate(
                job.state,
                job.arrived,
                job.work,
                job.kv_bytes,
                job.to,
                behind=job.state == "started" and self._is_behind(job, now),
                stepped=job.stepped,
                key=job.share.key,
                head=job.layers < 1,
            )
            for job in self._jobs
        ]
        speed, keys = self._tokens_s or FIRST_TOKENS_S, self._keys()
        return [self._jobs[index] for index in order(candidates, now, speed, self.policy, keys)]

    def _is_behind(self, job: PromptJob, now: float) -> bool:
        """Whether the link or the decode host of a started job is behind."""
        queued = job.queued_bytes() > self.policy.behind_bytes
        starved = not queued and job.remaining > 0 and job.starved()
        job.note_starved(starved, now)
        return queued or starved

    def _step(self, job: PromptJob) -> None:
        """One piece of work for this job. Its failure is its own."""
        current = logs.request_id.set(job.request_id)
        try:
            self._advance(job)
        except DisaggError as error:
            self._fail(job, error)
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; it ends this request alone
            logs.log.exception("engine_failed")
            text = (str(error).splitlines() or [""])[0]
            hint = "see the traceback in the server's log"
            self._fail(job, ModelError(f"the engine failed: {type(error).__name__}: {text}", hint))
        finally:
            logs.request_id.reset(current)
        self.on_beat()

    def _advance(self, job: PromptJob) -> None:
        if job.run is None:
            job.state = "started"
            job.run = job.start()
            self._note_wait(job, job.run)
            job.started.set_result(None)
            if self.policy.together and not job.run.done:
                return  # there may be more to start
        if not job.run.done:
            self._steps += 1
            job.stepped = self._steps
            stepped = self._started() if self.policy.together else [job]
            prompts = [one for one in stepped if one.remaining]
            before, began = _ahead(stepped), time.monotonic()
            computed_s = [_computed_s(one) for one in prompts]
            with self._changed:
                others = [other.arrived for other in self._jobs if other is not job and other.state != "computed"]
                alone = is_alone(job.arrived, others, self._latest, began, self.policy)
            job.run.step(self._chunk(job, alone))
            self._note_wait(job, job.run)
            seconds = [_computed_s(one) - earlier for one, earlier in zip(prompts, computed_s, strict=True)]
            self._rate(job, before - _ahead(stepped), sum(seconds))
            with self._changed:
                for one, spent in zip(prompts, seconds, strict=True):
                    self._computing.computed(one.share.key, spent, time.monotonic())
        for done in self._started() if self.policy.together else (job,):
            if done.run is not None and done.run.done:
                self._complete(done, done.run)

    def _chunk(self, job: PromptJob, alone: bool) -> int:
        """The most tokens of the job's next step."""
        most = chunk(alone, (job.tokens_s or self._tokens_s or 0.0) / job.layers, self.policy)
        return most if job.layers == 1 else min(most, split_chunk(job.tokens))

    def _note_wait(self, job: PromptJob, run: PrefillRun) -> None:
        """Note since when a job waits for the link, and for how much of it, if what its run has emitted is too much."""
        behind = job.queued_bytes() - self.policy.behind_bytes
        if behind > 0 and not run.done:
            job.waits.append(LinkWait(time.monotonic(), behind))

    def _started(self) -> list[PromptJob]:
        """The jobs whose runs a step may have finished."""
        with self._changed:
            return [job for job in self._jobs if job.state == "started"]

    def _complete(self, job: PromptJob, run: PrefillRun) -> None:
        with self._changed:
            job.state = "computed"
        job.computed.set_result(run)

    def _rate(self, job: PromptJob, tokens: int, seconds: float) -> None:
        if tokens >= RATED_TOKENS and seconds > 0:
            job.tokens_s = rate = job.layers * tokens / seconds
            if job.scored:
                return
            self._tokens_s = rate if self._tokens_s is None else self._tokens_s + RATE_WEIGHT * (rate - self._tokens_s)

    def _fail(self, job: PromptJob, error: DisaggError) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
        self._end(job, error)

    def _end(self, job: PromptJob, error: DisaggError) -> None:
        """Close the job's run. Whoever waits for it gets the error."""
        run, job.run = job.run, None
        try:
            if run is not None:
                run.close()
        except Exception:  # noqa: BLE001 - as above
            logs.log.exception("engine_failed_while_closing")
        _give_error(job, error)


def _ahead(jobs: Sequence[PromptJob]) -> int:
    """Tokens that these jobs have not computed, held ones among them: some engines find those in the first step."""
    return sum(job.run.remaining + job.run.held for job in jobs if job.run is not None)


def _computed_s(job: PromptJob) -> float:
    """Seconds of computing that went to this job. A step of an engine elsewhere may last longer, or not as long."""
    return job.run.timing.compute_s if job.run is not None else 0.0


def _give_error(job: PromptJob, error: DisaggError) -> None:
    for future in (job.started, job.computed):
        if not future.done():
            future.set_exception(error)
