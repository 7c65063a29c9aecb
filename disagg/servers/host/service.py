"""What the prefill and the decode server have in common: life cycle and admission. `report` has what they state."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec import structs

from disagg import logs
from disagg.api.base import without_value
from disagg.api.events import Event
from disagg.api.requests import CountBody, PromptBody
from disagg.api.sampling import Sampling
from disagg.api.status import CountAnswer, LeaseAnswer
from disagg.config import Fleet, Host
from disagg.engines.model.text import PromptTokenizer, check_ids
from disagg.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    DisaggError,
    Overloaded,
    RequestError,
    ServerUnavailable,
    UnknownModel,
)
from disagg.servers.host.admission import Admission, Leases
from disagg.servers.host.health import TEST_LIMIT_S
from disagg.servers.host.report import Engine, ReportingHost, last_error
from disagg.servers.host.request import ActiveRequest, Caller
from disagg.shares import Places

UNSTARTED = frozenset({"tokenising", "queued", "waiting for KV"})
RECENT = 0.2
"""The weight of one request in the average of recent ones."""
COUNTS = 0.25
"""The part of all places that calls of POST /count may have."""
SHORT_TEXT = 2048  # characters, which are tokenised without a thread

Body = TypeVar("Body", bound=PromptBody)


@dataclass(frozen=True, slots=True)
class ServiceCall(Generic[Body]):
    """POST `path` with a body of type `body`; `events(body, caller)` is the answer, and raises every refusal."""

    path: str
    body: type[Body]
    events: Callable[[Body, Caller], AsyncGenerator[Event, None]]


class Service(ReportingHost[Engine]):
    """One host's server, without HTTP. `load` runs once; until it returns only health and status answer."""

    def __init__(self, fleet: Fleet, host: Host, admission: Admission, make_engine: Callable[[], Engine]) -> None:
        super().__init__(fleet, host, admission)
        self._make_engine = make_engine
        self.leases = Leases()
        self._counts = Places(max(1, int(COUNTS * admission.limit)))  # of calls of POST /count

    @property
    def engine(self) -> Engine:
        """The loaded engine. Raises Overloaded while it loads."""
        if self._engine is None:
            raise Overloaded(f"{self.host.name} is still loading", "try again in a moment")
        return self._engine

    @abstractmethod
    async def probe_engine(self) -> None:
        """Let the engine compute one token. Raises what the engine raises; the caller keeps to `test_limit_s`."""

    @property
    def test_limit_s(self) -> float:
        """Seconds that `probe_engine` may take."""
        return TEST_LIMIT_S

    @abstractmethod
    async def load(self) -> None:
        """Load the model, warm up, open what must be open. Sets `state` to ok."""

    def _prepare(self) -> Engine:
        """Load the engine, run every kernel once, and let the tokenizer make what it makes on first use: seconds of
        work for a large one, which the event loop must not do."""
        engine = self._make_engine()
        engine.warm_up()
        _ = engine.tokenizer.format
        engine.tokenizer.token_bytes(engine.tokenizer.encode("a")[0])
        engine.on_beat = self.progress.beat
        return engine

    async def close(self) -> None:
        """Stop the engine and close everything that `load` opened."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    @abstractmethod
    def endpoints(self) -> Sequence[ServiceCall[Any]]:
        """The endpoints of this role."""

    @asynccontextmanager
    async def admitted(self, body: PromptBody, caller: Caller, sampling: Sampling) -> AsyncIterator[ActiveRequest]:
        """Admit a request; at the end of the block release what it holds, and count and log how it ended.

        Everything that can be refused before work begins is refused here: readiness, a place in the queue, the prompt,
        its length.
        """
        self._require_ready(body.model)
        arrived, record = time.monotonic(), self.record.admit(body)
        request = ActiveRequest(caller.request_id, sampling, arrived, arrived + body.deadline_s, body.share)
        request.entered, request.computed = record.entered, record.computed
        request.cleanup.callback(record.ended)
        self._enter(request, caller, body.lease_s)
        error: BaseException | None = None
        try:
            with request.cleanup:
                await self._admit(request, body, caller)
                yield request
        except BaseException as failure:  # also a cancellation: `finally` counts it
            error = failure
            raise
        finally:
            del self.active[request.key]
            self.leases.drop(request.key)
            self._count_end(request, caller.error or error)

    def drain(self) -> None:
        """Take no more requests, refuse those that have not begun, and let the others finish."""
        self.state = "draining"
        refusal = Overloaded(f"{self.host.name} is shutting down", "ask another host of the model, or wait for it")
        for caller in list(self.active.values()):
            if caller.request is not None and self.unstarted(caller.request):
                caller.end(refusal)

    def unstarted(self, request: ActiveRequest) -> bool:
        """Whether no work on this request would be lost if it ended now."""
        return request.phase in UNSTARTED and not (request.phase == "queued" and request.slot_sent)

    def extend_leases(self, request_ids: Collection[str]) -> LeaseAnswer:
        """POST /lease."""
        self.leases.extend(request_ids, time.monotonic())
        here = {caller.request.id for caller in self.active.values() if caller.request is not None}
        return LeaseAnswer(tuple(one for one in request_ids if one not in here))

    async def count_tokens(self, body: CountBody) -> CountAnswer:
        """POST /count. It has a place in the queue meanwhile, as tokenising a long prompt takes seconds. Most places
        are left to requests."""
        self._require_ready(body.model)
        with ExitStack() as place:
            count = self._counts.take(body.share, 1, time.monotonic())
            if count is None:
                counting = self._counts.taken
                raise Overloaded(f"the server is counting the tokens of {counting} prompts", "try again in a moment")
            place.callback(lambda: self._counts.give_back(count, time.monotonic()))
            self._admission.take_place(body.share, place)
            record = self.record.admit(body)
            place.callback(record.ended)
            record.entered("tokenising")
            try:
                async with asyncio.timeout(body.deadline_s):
                    tokens = await self._tokenise(body)
                    if not body.list_tokens:
                        return CountAnswer(len(tokens))
                    texts = await self.work.run(body.share, partial(_texts, self.engine.tokenizer, tokens))
                    return CountAnswer(len(tokens), tuple(tokens), texts)
            except TimeoutError:
                raise DeadlineExceeded("the prompt was not tokenised by the deadline", "raise the timeout") from None

    def _enter(self, request: ActiveRequest, caller: Caller, lease_s: float | None) -> None:
        caller.request = request
        self.active[request.key] = caller
        if lease_s is not None:
            request.leased = True
            late = Cancelled(
                f"its caller did not extend its lease of {lease_s:g} s", "POST /lease, several times in it"
            )
            self.leases.take(request.key, request.id, lease_s, request.arrived, lambda: caller.end(late))

    def _require_ready(self, model: str) -> None:
        """Refuse work while loading or draining, and for a model that is not served here."""
        if not self.engine_alive:
            raise ServerUnavailable(f"the engine of {self.host.name} has stopped", "see its log, then `disagg restart`")
        if problem := self.problem:
            raise ServerUnavailable(problem, "ask another host; this one is tested until it works or is restarted")
        if self.state != "ok":
            raise Overloaded(f"{self.host.name} is {self.state}", "try again in a moment")
        if model != self.model.name and model not in self.model.aliases:
            raise UnknownModel(f"{self.host.name} serves {self.model.name}, not {model!r}", "ask a host of that model")

    async def _admit(self, request: ActiveRequest, body: PromptBody, caller: Caller) -> None:
        """Take a place, then tokenise: tokenising a long prompt takes seconds, which the queue must bound too."""
        text = f"{self.host.name} gave the place of this request to a key that has fewer"

        def waits() -> bool:
            return request.waits and not body.answer_tokens

        def give_up() -> None:
            caller.end(Overloaded(text, "try again in a moment"))

        self._admission.take_place(body.share, request.cleanup, waits, give_up)
        request.enter("tokenising")
        prompt = await request.within_deadline(self._tokenise(body), "the prompt was not tokenised")
        vocab_size = self.engine.info.profile.vocab_size
        answer = check_ids(body.answer_tokens, vocab_size, "answer_tokens")
        check_ids([token for token, _ in request.sampling.logit_bias], vocab_size, "logit_bias")
        check_ids(request.sampling.stop_token_ids, vocab_size, "stop_token_ids")
        if body.suffix:
            ends = (*request.sampling.stop_token_ids, *self.engine.tokenizer.ends_of_fill)
            request.sampling = structs.replace(request.sampling, stop_token_ids=ends)
        if texts := request.sampling.bad_words:
            words = self.work.run(body.share, partial(self.engine.tokenizer.words, texts))
            request.bad_words = await request.within_deadline(words, "bad_words were not tokenised")
        if request.sampling.fit_context:
            room = max(1, self._context - len(prompt))
            request.sampling = structs.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
        self._require_context(len(prompt), max(request.sampling.max_tokens, len(answer)))
        request.tokens, request.answered = prompt + answer, len(answer)
        request.tokenised = time.monotonic()
        request.enter("queued")
        self.count(requests=1, prompt_tokens=request.prompt_tokens)

    async def _tokenise(self, body: PromptBody) -> list[int]:
        """Token ids of the prompt; long ones on a thread, so that other requests are still served."""
        tokenizer, content = self.engine.tokenizer, body.content
        if isinstance(content, str) and len(content) + len(body.suffix) < SHORT_TEXT:
            return tokenizer.encode(content, suffix=body.suffix)
        encode = partial(
            tokenizer.encode, content, body.template, limit=self._context, ending=body.ending, suffix=body.suffix
        )
        return await self.work.run(body.share, encode)

    @property
    def _context(self) -> int:
        """Tokens of the longest request: what hosts.toml allows and the checkpoint can do."""
        return min(self.model.context, self.info.profile.context) if self.info else self.model.context

    def _require_context(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises ContextLengthExceeded if prompt and answer together do not fit."""
        limit = self._context
        if prompt_tokens + max_tokens > limit:
            raise ContextLengthExceeded(
                f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens = {prompt_tokens + max_tokens}, "
                f"over the {limit} tokens of {self.model.name}",
                "shorten the prompt or lower max_tokens",
            )

    def _count_end(self, request: ActiveRequest, error: BaseException | None) -> None:
        """Count and log the end of a request. One that was refused before it was admitted counts as none."""
        admitted = request.tokenised > 0
        if admitted:
            self.engine_health.request_ended(error, time.monotonic())
        sent_back = admitted and isinstance(error, Overloaded)
        if sent_back or isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled):
            self.count(cancelled=admitted)
            seconds = round(time.monotonic() - request.arrived, 3)
            reason = {"reason": error.message} if isinstance(error, DisaggError) else {}
            logs.info("request_cancelled", request_id=request.id, phase=request.phase, seconds=seconds, **reason)
        elif not admitted:
            return
        elif error is None:
            self.count(completed=1)
            self._request_s += RECENT * (time.monotonic() - request.arrived - self._request_s)
        else:
            self.count(failed=1)
            last = last_error(error)
            if not isinstance(error, RequestError):  # what a caller does wrong is no trouble of this host
                self._last_error = last
            logs.info("request_failed", code=last.code, message=without_value(last.message), hint=last.hint)


AnyService = Service[Any]


def _texts(tokenizer: PromptTokenizer, tokens: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(map(tokenizer.token_bytes, tokens))
