"""What the prefill and the decode server have in common: life cycle, admission, health, status and counters."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import psutil
from msgspec import structs

from disagg import logs
from disagg.api.events import Event
from disagg.api.names import Role
from disagg.api.requests import PromptBody
from disagg.api.sampling import Sampling
from disagg.api.status import (
    Counters,
    DeviceUse,
    Health,
    LastError,
    LeaseAnswer,
    Load,
    Memory,
    ModelFingerprint,
    ServerState,
    Status,
)
from disagg.config import Fleet, Host, Model, served_digest
from disagg.engines.base import DecodeEngine, EngineInfo, PrefillEngine
from disagg.engines.model.text import check_ids
from disagg.errors import (
    Cancelled,
    ContextLengthExceeded,
    DisaggError,
    Overloaded,
    ServerUnavailable,
    UnknownModel,
)
from disagg.servers import caller as callers
from disagg.servers.admission import Admission, retry_after
from disagg.servers.caller import Caller
from disagg.servers.health.engine import EngineHealth
from disagg.servers.health.leases import Leases
from disagg.servers.health.progress import Progress
from disagg.servers.request import ActiveRequest
from disagg.token import RELEASE_VARIABLE
from disagg.version import VERSION, code_hash

"""Names the deployed release that a server runs; not set if it runs from an installation."""
UNSTARTED = frozenset({"tokenising", "queued", "waiting for KV"})
COMPUTED = frozenset({"sending KV", "generating"})
"""Phases in which a request's prompt is computed."""
AFTER_START_S = 5
"""What callers of a server that loads or drains wait."""
RECENT = 0.2
"""The weight of one request in the average of recent ones."""
SHORT_TEXT = 2048  # characters, which are tokenised without a thread

T = TypeVar("T")
Body = TypeVar("Body", bound=PromptBody)
Engine = TypeVar("Engine", bound=PrefillEngine | DecodeEngine)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """POST `path` with a body of type `body`; `events(body, request_id)` is the answer, and raises every refusal."""

    path: str
    body: type[Body]
    events: Callable[[Body, str], AsyncGenerator[Event, None]]


class Service(ABC, Generic[Engine]):
    """One host's server, without HTTP. `load` runs once; until it returns only health and status answer."""

    role: ClassVar[Role]

    def __init__(self, fleet: Fleet, host: Host, admission: Admission) -> None:
        self.fleet = fleet
        self.host = host
        self.state: Literal["loading", "ok", "draining"] = "loading"
        self._engine: Engine | None = None
        self._admission = admission
        self._counters = Counters()
        self._last_error: LastError | None = None
        self._request_s = 1.0  # how long recent requests took, from arrival to end
        self._started = time.monotonic()
        self.boot_id = secrets.token_hex(8)
        self.progress = Progress()
        self.stalled = False  # set by the monitor
        self.engine_health = EngineHealth(self._started)
        self.active: dict[str, Caller] = {}  # of every request from its arrival to its end, by the request's key
        self.leases = Leases()

    @property
    def model(self) -> Model:
        return self.fleet.models[self.host.model]

    @property
    def engine(self) -> Engine:
        """The loaded engine. Raises Overloaded while it loads."""
        if self._engine is None:
            raise Overloaded(f"{self.host.name} is still loading", "try again in a moment")
        return self._engine

    @property
    def info(self) -> EngineInfo | None:
        """The engine's description of itself, None until it is loaded."""
        return self._engine.info if self._engine else None

    @property
    def engine_alive(self) -> bool:
        """False once a loaded engine cannot serve any more."""
        return True

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """KV of requests that the host holds now."""

    @property
    def kv_limit(self) -> int:
        """The bound on `kv_bytes`; 0 if there is none."""
        return 0

    @property
    def kv_held_bytes(self) -> int:
        """KV of finished requests, given up if a request needs the room."""
        return 0

    @property
    def queue_tokens(self) -> int:
        """Prompt tokens of admitted requests that are not computed yet."""
        requests = [caller.request for caller in self.active.values() if caller.phase not in COMPUTED]
        return sum(len(request.tokens) for request in requests if request is not None)

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens per second, as measured lately."""
        return None

    @property
    def decode_tokens_s(self) -> float | None:
        """Answer tokens per second of one request, as measured lately."""
        return None

    @property
    def links(self) -> Mapping[str, float]:
        """Bytes/s of recent transfers from this host, by "address:port" of the decode host."""
        return {}

    @property
    def busy(self) -> bool:
        """Whether the engine has work, so that its beats must go on. Engines without beats have none."""
        return False

    @abstractmethod
    async def probe_engine(self) -> None:
        """Let the engine compute one token. Raises what the engine raises; the caller sets a limit of time."""

    @abstractmethod
    async def load(self) -> None:
        """Load the model, warm up, open what must be open. Sets `state` to ok."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and close everything that `load` opened."""

    @abstractmethod
    def endpoints(self) -> Sequence[Endpoint[Any]]:
        """The endpoints of this role."""

    @asynccontextmanager
    async def admitted(self, body: PromptBody, request_id: str, sampling: Sampling) -> AsyncIterator[ActiveRequest]:
        """Admit a request; at the end of the block release what it holds, and count and log how it ended.

        Everything that can be refused before work begins is refused here: readiness, a place in the queue, the prompt,
        its length.
        """
        self._require_ready(body.model)
        arrived = time.monotonic()
        request = ActiveRequest(request_id, sampling, arrived, arrived + body.deadline_s)
        caller = callers.current.get() or Caller()
        self._enter(request, caller, body.lease_s)
        error: BaseException | None = None
        try:
            with request.cleanup:
                await self._admit(request, body)
                yield request
        except BaseException as failure:
            error = failure
            raise
        finally:
            del self.active[request.key]
            self.leases.drop(request.key)
            self._count_end(request, caller.error or error)

    def count(self, **added: int) -> None:
        """Add to counters, by their names."""
        self._counters = structs.replace(
            self._counters, **{name: getattr(self._counters, name) + more for name, more in added.items()}
        )

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

    @property
    def queue_s(self) -> float:
        """Seconds until the queue has moved on by one place per waiting request."""
        return self._request_s * self._admission.queued / self._admission.running_limit

    @property
    def retry_after_s(self) -> int:
        """When a refused caller may find a place."""
        return retry_after(self.queue_s if self.state == "ok" else AFTER_START_S)

    def extend_leases(self, request_ids: Collection[str]) -> LeaseAnswer:
        """POST /lease."""
        self.leases.extend(request_ids, time.monotonic())
        here = {caller.request.id for caller in self.active.values() if caller.request is not None}
        return LeaseAnswer(tuple(one for one in request_ids if one not in here))

    def load_figures(self) -> Load:
        """The answer of GET /load."""
        return Load(
            status=self.health_state,
            boot_id=self.boot_id,
            beats=self.progress.beats,
            queue=self._admission.queued,
            running=self._admission.running,
            running_limit=self._admission.running_limit,
            queue_tokens=self.queue_tokens,
            kv_bytes=self.kv_bytes,
            kv_limit=self.kv_limit,
            kv_held_bytes=self.kv_held_bytes,
            prefill_tokens_s=self.prefill_tokens_s,
            decode_tokens_s=self.decode_tokens_s,
            links=self.links,
        )

    @property
    def health_state(self) -> ServerState:
        """What GET /health says."""
        if not self.engine_alive or self.engine_health.fault:
            return "error"
        return "stalled" if self.stalled else self.state

    @property
    def problem(self) -> str:
        """What is wrong with the loaded engine, "" if nothing is. Asks the engine nothing: it may be stuck."""
        if self.state == "loading":
            return ""
        if fault := self.engine_health.fault:
            return f"the engine of {self.host.name} does not work: {fault}"
        return f"the engine of {self.host.name} has made no progress" if self.stalled else ""

    def health(self) -> Health:
        """The answer of GET /health to a caller with the fleet's token."""
        info = self.info
        return Health(
            status=self.health_state,
            model=self.model.name,
            role=self.role,
            host=self.host.name,
            loaded=info is not None,
            backend=info.backend if info else None,
            simulated=self.host.simulated,
            version=VERSION,
            code=code_hash(),
            config=served_digest(self.fleet, self.host),
            release=os.environ.get(RELEASE_VARIABLE) or None,
            versions=info.versions if info else {},
            fingerprint=ModelFingerprint(**info.fingerprint.to_json()) if info else None,
            preflight=info.preflight if info else (),
            boot_id=self.boot_id,
            uptime_s=round(time.monotonic() - self._started, 3),
            pid=os.getpid(),
        )

    def status(self, utilisation: float | None = None) -> Status:
        """The answer of GET /status. utilisation: of the accelerator, 0 to 1."""
        memory, info = psutil.virtual_memory(), self.info
        return Status(
            **structs.asdict(self.health()),
            queue=self._admission.queued,
            running=self._admission.running,
            kv_bytes=self.kv_bytes,
            kv_held_bytes=self.kv_held_bytes,
            memory=Memory(
                total=memory.total,
                available=memory.available,
                process=psutil.Process().memory_info().rss,
                weights=info.memory_bytes if info else 0,
            ),
            device=DeviceUse(info.backend if info else None, psutil.cpu_percent(), utilisation),
            counters=self._counters,
            last_error=self._last_error,
        )

    def _enter(self, request: ActiveRequest, caller: Caller, lease_s: float | None) -> None:
        caller.request = request
        self.active[request.key] = caller
        if lease_s is not None:
            late = Cancelled(
                f"its caller did not extend its lease of {lease_s:g} s", "POST /lease, several times in it"
            )
            self.leases.take(request.key, request.id, lease_s, request.arrived, lambda: caller.end(late))

    def note_problem(self) -> None:
        """Report the engine's problem as the last error, though no request may have met it."""
        self._last_error = _last_error(ServerUnavailable(self.problem, "its log has the details"))

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

    async def _admit(self, request: ActiveRequest, body: PromptBody) -> None:
        """Take a place, then tokenise: tokenising a long prompt takes seconds, which the queue must bound too."""
        self._admission.take_place(request.cleanup)
        prompt = await request.within_deadline(self._tokenise(body), "the prompt was not tokenised")
        vocab_size = self.engine.info.profile.vocab_size
        answer = check_ids(body.answer_tokens, vocab_size, "answer_tokens")
        check_ids([token for token, _ in request.sampling.logit_bias], vocab_size, "logit_bias")
        if request.sampling.fit_context:
            room = max(1, self._context - len(prompt))
            request.sampling = structs.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
        self._require_context(len(prompt), max(request.sampling.max_tokens, len(answer)))
        request.tokens, request.answered = prompt + answer, len(answer)
        request.tokenised = time.monotonic()
        request.phase = "queued"
        self.count(requests=1, prompt_tokens=request.prompt_tokens)

    async def _tokenise(self, body: PromptBody) -> list[int]:
        """Token ids of the prompt; long ones on a worker thread, so that other requests are still served."""
        tokenizer, content = self.engine.tokenizer, body.content
        if isinstance(content, str) and len(content) < SHORT_TEXT:
            return tokenizer.encode(content)
        return await asyncio.to_thread(tokenizer.encode, content, body.template)

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
        if isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled):
            self.count(cancelled=admitted)
            seconds = round(time.monotonic() - request.arrived, 3)
            reason = {"reason": error.message} if isinstance(error, Cancelled) else {}
            logs.info("request_cancelled", request_id=request.id, phase=request.phase, seconds=seconds, **reason)
        elif not admitted:
            return
        elif error is None:
            self.count(completed=1)
            self._request_s += RECENT * (time.monotonic() - request.arrived - self._request_s)
        else:
            self.count(failed=1)
            last = self._last_error = _last_error(error)
            logs.info("request_failed", code=last.code, message=last.message, hint=last.hint)


AnyService = Service[Any]


async def on_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` on a daemon thread and return its result. A stopping process does not wait for it: loading a model
    takes minutes, and stopping it loses nothing. If the caller is cancelled, the thread runs on and its
    result is dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:  # noqa: BLE001 - it is raised where the future is awaited
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def _last_error(error: BaseException) -> LastError:
    now = round(time.time(), 3)
    if isinstance(error, DisaggError):
        return LastError(now, error.code(), error.message, error.hint)
    return LastError(now, type(error).__name__, repr(error))
