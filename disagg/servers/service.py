"""What the prefill and the decode server have in common: life cycle, health, status and counters."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import psutil
from starlette.requests import Request
from starlette.routing import Route

from disagg.api.requests import Messages
from disagg.api.sampling import Sampling
from disagg.config import Fleet, Host, Model, served_digest
from disagg.engines.base import EngineInfo
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import (
    Cancelled,
    ContextLengthExceeded,
    DisaggError,
    Overloaded,
    ServerUnavailable,
    UnknownModel,
)
from disagg.servers import logs
from disagg.servers.admission import Admission
from disagg.servers.answer import within
from disagg.servers.job import Job
from disagg.servers.schemas import GenerateBody, PromptBody
from disagg.servers.sse import Event
from disagg.version import VERSION, code_hash

State = Literal["loading", "ok", "draining"]
RELEASE_VARIABLE = "DISAGG_RELEASE"
"""Names the deployed release that a server runs; not set where it runs from an installation."""


@dataclass(slots=True)
class Counters:
    """Totals since the server started. `computed_prompt_tokens`: prompt tokens run through the model here."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_prompt_tokens: int = 0
    kv_bytes_total: int = 0


@dataclass(slots=True)
class Service(ABC):
    """One host's server behind HTTP. `load` runs once; until then only /health answers."""

    fleet: Fleet
    host: Host
    state: State = "loading"
    counters: Counters = field(default_factory=Counters)
    started: float = field(default_factory=time.monotonic)
    last_error: dict[str, Any] | None = None  # of the last request that failed here: when, and its error

    role: Literal["prefill", "decode"] = field(init=False)

    @property
    def model(self) -> Model:
        return self.fleet.models[self.host.model]

    @property
    @abstractmethod
    def info(self) -> EngineInfo | None:
        """The engine's own account, None until it is loaded."""

    @abstractmethod
    async def load(self) -> None:
        """Load the model, warm up, open what must be open. Sets `state` to ok."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and everything that `load` opened."""

    @abstractmethod
    def routes(self) -> Sequence[Route]:
        """The endpoints of this role."""

    @abstractmethod
    def load_figures(self) -> dict[str, int]:
        """queue, running and kv_bytes now."""

    @property
    def engine_alive(self) -> bool:
        """False once a loaded engine can serve no more."""
        return True

    def require_ready(self, model: str) -> None:
        """Refuse work while loading or draining, and for a model that is not served here."""
        if not self.engine_alive:
            raise ServerUnavailable(f"the engine of {self.host.name} has stopped", "see its log, then `disagg restart`")
        if self.state != "ok":
            raise Overloaded(f"{self.host.name} is {self.state}", "try again in a moment")
        if model != self.model.name and model not in self.model.aliases:
            raise UnknownModel(f"{self.host.name} serves {self.model.name}, not {model!r}", "ask a host of that model")

    def _require_context(self, prompt_tokens: int, max_tokens: int) -> None:
        """ContextLengthExceeded where prompt and answer together do not fit."""
        limit = min(self.model.context, self.info.profile.context) if self.info else self.model.context
        if prompt_tokens + max_tokens > limit:
            raise ContextLengthExceeded(
                f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens = {prompt_tokens + max_tokens}, "
                f"over the {limit} tokens of {self.model.name}",
                "shorten the prompt or lower max_tokens",
            )

    async def admit(self, request: Request, body: PromptBody, tokenizer: PromptTokenizer, admission: Admission) -> Job:
        """Everything that can be refused before work begins: readiness, a place in the queue, prompt, context.

        The place comes first: tokenising a long prompt takes seconds, and the queue must bound that too.
        """
        arrived = time.monotonic()
        self.require_ready(body.model)
        with ExitStack() as held:
            admission.take_place(held)
            tokens = await within(
                self._tokenise(tokenizer, body.content), arrived + body.deadline_s, "the prompt was not tokenised"
            )
            sampling = body.sampling.sampling() if isinstance(body, GenerateBody) else Sampling(max_tokens=1)
            self._require_context(len(tokens), sampling.max_tokens)
            self.counters.requests += 1
            self.counters.prompt_tokens += len(tokens)
            request_id = request.scope["disagg.request_id"]
            return Job(request_id, tokens, body, sampling, held.pop_all(), arrived, time.monotonic())

    async def counted(self, job: Job, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Pass the events on; whatever happens, let go of what the job holds and book how it ended."""
        error: BaseException | None = None
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except BaseException as failure:
            error = failure
            raise
        finally:
            job.held.close()
            self.count_end(error)

    async def _tokenise(self, tokenizer: PromptTokenizer, content: str | Messages | Sequence[int]) -> list[int]:
        """Token ids of the prompt; long texts on a worker thread, so that others are still served."""
        if isinstance(content, str) and len(content) < 2048:
            return tokenizer.encode(content)
        return await asyncio.to_thread(tokenizer.encode, content)

    def count_end(self, error: BaseException | None) -> None:
        """Book the end of a request, however it ended."""
        if error is None:
            self.counters.completed += 1
        elif isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled):
            self.counters.cancelled += 1
        else:
            self.counters.failed += 1
            detail = error.to_json() if isinstance(error, DisaggError) else {"message": repr(error)}
            self.last_error = {"time": round(time.time(), 3), **detail}
            logs.info("request_failed", **detail)

    def health(self) -> dict[str, Any]:
        """What /health answers to a caller with the fleet's token."""
        info = self.info
        return {
            "status": self.state if self.engine_alive else "error",
            "model": self.model.name,
            "loaded": info is not None,
            "backend": info.backend if info else None,
            "role": self.role,
            "host": self.host.name,
            "simulated": self.host.simulated,
            "version": VERSION,
            "code": code_hash(),
            "config": served_digest(self.fleet, self.host),
            "release": os.environ.get(RELEASE_VARIABLE) or None,
            "versions": info.versions if info else {},
            "fingerprint": info.fingerprint.to_json() if info else None,
            "preflight": [finding.to_json() for finding in info.preflight] if info else [],
            "uptime_s": round(time.monotonic() - self.started, 3),
            "pid": os.getpid(),
        }

    def status(self, gpu: float | None = None) -> dict[str, Any]:
        """What /status answers: health, load, memory, device use, counters. gpu: how busy that is, 0 to 1."""
        memory, process = psutil.virtual_memory(), psutil.Process()
        return {
            **self.health(),
            **self.load_figures(),
            "memory": {
                "total": memory.total,
                "available": memory.available,
                "process": process.memory_info().rss,
                "weights": self.info.memory_bytes if self.info else 0,
            },
            "device": {
                "name": self.info.backend if self.info else None,
                "cpu_percent": psutil.cpu_percent(),
                "utilisation": gpu,
            },
            "counters": asdict(self.counters),
            "last_error": self.last_error,
        }
