"""What an engine is: the two interfaces every framework implements, and the values that cross them.

PrefillEngine: tokens -> stream of layer KV. DecodeEngine: KV + last token -> stream of tokens. Both can also run a
request alone, prompt and answer. Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.api.events import FinishReason
from disagg.api.sampling import Sampling
from disagg.api.status import PreflightFinding
from disagg.engines.model.profile import ModelProfile
from disagg.engines.model.text import PromptTokenizer
from disagg.kv.blocks import Block
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.layout import Layout
from disagg.kv.received import ReceivedKV
from disagg.kv.wire import AS_IS, WireForm


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, as the engine chose it. `top`: (id, logprob) of the likeliest, where asked for.
    `finish`: set on the last token of a request: "stop" for an end-of-sequence token, "length" at max_tokens."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """Seconds on the prefill host's monotonic clock. `started`/`ended`: time.monotonic() around the compute."""

    started: float
    ended: float
    tokens: int

    @property
    def compute_s(self) -> float:
        return self.ended - self.started


@dataclass(slots=True)
class DecodeTiming:
    """time.monotonic() on the decode host as a request passes.

    submitted -> started: waiting for the engine's thread, at most one step of the batch and others' ingest;
    started -> ingested: building the caches of its own received KV, next to nothing without one;
    ingested -> first_token: its first step, in one batch with whatever else runs, a chunk of others' prompts included.
    `computed_prompt_tokens`: prompt tokens this host ran through the model itself (1 after a hand-off, all of them
    alone)."""

    submitted: float = 0.0
    started: float = 0.0
    ingested: float = 0.0
    first_token: float = 0.0
    computed_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One request to a DecodeEngine. tokens: the whole prompt. kv: KV of tokens[:-1], or None to compute alone."""

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    kv: ReceivedKV | None = None


class Listener(Protocol):
    """Called on the engine's thread, never blocking: one call per decode step with that step's tokens."""

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None: ...

    def on_error(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What both engines say about themselves after load."""

    backend: str  # e.g. "transformers/cuda", "mlx/cpu"
    versions: dict[str, str]  # package -> version
    profile: ModelProfile
    layout: Layout
    fingerprint: Fingerprint
    preflight: tuple[PreflightFinding, ...] = ()
    memory_bytes: int = 0  # weights, as loaded
    eos_ids: frozenset[int] = field(default_factory=frozenset)


class PrefillEngine(Protocol):
    """Computes KV. Calls come from one thread at a time."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        cancelled: Callable[[], bool] = lambda: False,
        chunk_tokens: int | None = None,
        wire: WireForm = AS_IS,
    ) -> PrefillTiming:
        """Run tokens in chunks and emit each layer's new rows as soon as they exist, from inside the computation:
        an exception from `emit` ends it.

        `tokens` is exactly what KV is wanted for (the prompt without its last token); it may be empty.
        Only rows that the layout keeps for len(tokens) tokens are emitted, in the form `wire`. Raises Cancelled between
        chunks.
        """
        ...

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[Token]:
        """Run a whole request alone: the baseline and the reference. Raises Cancelled between tokens. Stop strings
        are the caller's to look for: it closes the iterator where one is met."""
        ...

    def warm_up(self) -> None:
        """Run a few tokens, so that the first request does not pay for what a framework does only once."""
        ...

    def logits(self, tokens: Sequence[int], last: int) -> list[list[float]]:
        """Logits [last, vocab] after each of the final `last` tokens of one teacher-forced pass. For `verify`."""
        ...


class DecodeEngine(Protocol):
    """Turns KV into tokens with continuous batching, on a thread of its own."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    def warm_up(self) -> None:
        """Run one small request through everything, so that the first real one is not slow."""
        ...

    def allocate(self, nbytes: int) -> Any:
        """Memory for KV that is to be received: see kv.arena.Allocate."""
        ...

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request; its tokens arrive at the listener. ModelError where the engine is no longer alive.

        From its first token on the engine reads `request.kv` no more: the memory may then go to the next transfer."""
        ...

    def after_step(self, call: Callable[[], None]) -> None:
        """Have `call`, which must not block, called on the engine's thread after each step, once all listeners have
        had its tokens. There is one such call at a time."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request at any stage; no call to its listener begins after this returns. Unknown ids are fine."""
        ...

    def logits(self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None) -> list[list[float]]:
        """Like PrefillEngine.logits; with `kv`, which covers tokens[:-last], only the last tokens are computed."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV in the engine's own caches. Received buffers, also of requests that wait to be ingested, are not
        among them: they are the receiver's to count until they are released."""
        ...

    @property
    def running(self) -> int:
        """Requests in the engine, queued or decoding."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine's thread has ended, for whatever reason: no request will be served any more."""
        ...

    def close(self) -> None:
        """Stop the engine's thread; running requests get Cancelled."""
        ...
