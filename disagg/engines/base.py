"""The two interfaces of engines, PrefillEngine and DecodeEngine, and the values that cross them.

PrefillEngine: tokens -> stream of layer KV. DecodeEngine: KV + last token -> stream of tokens. Both can also run a
request alone, prompt and answer. Nothing here imports a framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.api.events import FinishReason
from disagg.api.names import AS_IS, WireForm
from disagg.api.sampling import Sampling
from disagg.api.status import PreflightFinding
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.profile import ModelProfile
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import Cancelled
from disagg.kv.blocks import Block
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.layout import Layout
from disagg.kv.received import ReceivedKV


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. top: (id, logprob) of the likeliest tokens, if requested.
    finish: set on the last token of a request: "stop" for an end-of-sequence token, "length" at max_tokens."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """started, ended: time.monotonic() on the prefill host, before and after the compute. tokens: computed.
    compute_s: spent on this prompt; the rest of the time between the two went to others."""

    started: float
    ended: float
    tokens: int
    compute_s: float

    def plus(self, began: float, ended: float) -> PrefillTiming:
        """With one more token, computed between these two times."""
        return PrefillTiming(self.started, ended, self.tokens + 1, self.compute_s + ended - began)


@dataclass(slots=True)
class DecodeTiming:
    """The stages of one request on the decode host, as time.monotonic().

    submitted -> started: waiting for the engine's thread, at most one step of the batch and other requests' ingest.
    started -> ingested: building caches from the received KV; close to 0 without KV.
    ingested -> first_token: its first step, together with the rest of the batch and a chunk of other requests' prompts.
    computed_prompt_tokens: prompt tokens that this host ran through the model: 1 after a hand-off, else all that were
    not held.
    """

    submitted: float = 0.0
    started: float = 0.0
    ingested: float = 0.0
    first_token: float = 0.0
    computed_prompt_tokens: int = 0


class HeldKV(Protocol):
    """KV of a prompt's first `tokens` tokens, kept from a finished request. It is not given up before `release`."""

    @property
    def tokens(self) -> int: ...

    def release(self) -> None:
        """Let the engine give it up. Safe to call twice, and from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One request to a DecodeEngine.

    tokens: the prompt, and the first `answered` tokens of the answer if it goes on after them; they count in
    sampling.max_tokens. held: from `find_held` for these tokens and this salt. kv: KV of tokens [held.tokens or 0,
    len(tokens) - 1); None: the engine computes what is not held. salt: only requests with the same salt share held KV.
    constraint: the form that the answer must have, after the tokens that are given. hold_prompt: hold the received KV
    from the first token on.
    """

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    kv: ReceivedKV | None = None
    held: HeldKV | None = None
    answered: int = 0
    salt: str = ""
    constraint: Constraint | None = None
    hold_prompt: bool = False


class Listener(Protocol):
    """Callbacks of a request, called on the engine's thread; they must not block. on_tokens: once per decode step."""

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None: ...

    def on_error(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded engine: backend, package versions, the model's profile, layout and fingerprint, and its preflight."""

    backend: str  # e.g. "transformers/cuda", "mlx/cpu"
    versions: dict[str, str]  # package -> version
    profile: ModelProfile
    layout: Layout
    fingerprint: Fingerprint
    preflight: tuple[PreflightFinding, ...] = ()
    memory_bytes: int = 0  # weights, as loaded
    eos_ids: frozenset[int] = field(default_factory=frozenset)


class PrefillRun(Protocol):
    """One prompt that a PrefillEngine computes piece by piece. All calls come from the engine's thread."""

    @property
    def remaining(self) -> int:
        """Prompt tokens that are still to be computed."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to do. `step` must not be called any more."""
        ...

    @property
    def held(self) -> int:
        """Tokens whose KV was there already, from earlier prompts."""
        ...

    @property
    def timing(self) -> PrefillTiming: ...

    def step(self, max_tokens: int | None = None) -> None:
        """Compute the next tokens of the prompt, at most `max_tokens` and one chunk, or generate one token after it.
        An exception ends the run: only `close` may be called after it."""
        ...

    def close(self) -> None:
        """Let go of the KV, unless the engine keeps it for later prompts. May be called twice."""
        ...


def _never() -> bool:
    return False


def _ignore() -> None:
    pass


class PrefillEngine(ABC):
    """Computes KV. Calls come from one thread at a time; several runs may be open at once."""

    info: EngineInfo
    tokenizer: PromptTokenizer
    on_beat: Callable[[], None] = staticmethod(_ignore)
    """Called whenever a piece of work is finished: each layer of each chunk."""

    @abstractmethod
    def start(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        start: int = 0,
        wire: WireForm = AS_IS,
        salt: str = "",
        chunk_tokens: int | None = None,
    ) -> PrefillRun:
        """A run that computes the KV of tokens and emits each layer's new rows as soon as they are computed. `emit` is
        called from inside the computation, and here for rows that are held; an exception in it ends the run.

        tokens: the prompt without its last token; may be empty. Only rows from `start` on that the layout keeps for
        len(tokens) tokens are emitted, in the form `wire`. salt: only prompts with the same salt share held KV.
        """

    @abstractmethod
    def start_answer(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        emit: Callable[[Token], None],
        *,
        answered: int = 0,
        salt: str = "",
        constraint: Constraint | None = None,
    ) -> PrefillRun:
        """A run of a whole request on this engine alone: `emit` gets one token per step after the prompt. answered: how
        many of `tokens`, the last ones, belong to the answer. constraint: the form that the rest must have. Stop
        strings are not applied: the caller closes the run at one."""

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        cancelled: Callable[[], bool] = _never,
        chunk_tokens: int | None = None,
        wire: WireForm = AS_IS,
    ) -> PrefillTiming:
        """`start`, computed to its end. Raises Cancelled between chunks."""
        with closing(self.start(tokens, emit, wire=wire, chunk_tokens=chunk_tokens)) as run:
            while not run.done:
                if cancelled():
                    computed = len(tokens) - run.remaining
                    raise Cancelled(f"the request was cancelled after {computed} of {len(tokens)} prompt tokens")
                run.step()
            return run.timing

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        answered: int = 0,
        cancelled: Callable[[], bool] = _never,
    ) -> Iterator[Token]:
        """The tokens of `start_answer`. Raises Cancelled between them."""
        made: list[Token] = []
        with closing(self.start_answer(tokens, sampling, made.append, answered=answered)) as run:
            while not run.done:
                if cancelled():
                    raise Cancelled(
                        f"the request was cancelled while it was {'computed' if run.remaining else 'decoded'}"
                    )
                run.step()
                yield from made
                made.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of KV of finished prompts, kept for prompts that begin alike. Readable from any thread."""
        return 0

    @abstractmethod
    def warm_up(self) -> None:
        """Run a few tokens, so that the framework's one-time work does not delay the first request."""

    @abstractmethod
    def logits(self, tokens: Sequence[int], last: int) -> list[list[float]]:
        """Logits [last, vocab] after each of the last `last` tokens, in one teacher-forced pass. For `verify`."""


class DecodeEngine(Protocol):
    """Turns KV into tokens with continuous batching, on a thread of its own.

    on_beat: called on that thread after each piece of work: a step, a chunk of a prompt, a command. It must not block.
    """

    on_beat: Callable[[], None]

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    def warm_up(self) -> None:
        """Run small requests, so that the framework's one-time work does not delay the first request."""
        ...

    def allocate(self, nbytes: int) -> Any:
        """Memory to receive KV into; see kv.arena.Allocate."""
        ...

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request; its tokens go to the listener. ModelError if the engine is no longer alive.

        After the first token the engine reads neither `request.kv`, so that its memory may be reused, nor
        `request.held`, so that it may be released. The KV of a request that ends is held before its last token is
        delivered."""
        ...

    def find_held(self, tokens: Sequence[int], salt: str) -> HeldKV | None:
        """The longest held KV that a request with these tokens and this salt can go on from, shorter than `tokens`;
        None if there is none. Release it in any case. Callable from any thread."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of held KV; not part of `kv_bytes`."""
        ...

    def give_up_held(self, nbytes: int) -> None:
        """Drop at least `nbytes` of held KV, the least recently used first, if so much is not in use by a request.
        Callable from any thread."""
        ...

    def after_step(self, call: Callable[[], None]) -> None:
        """Set the function to call on the engine's thread after each step, after all listeners. It must not block and
        replaces the one set before."""
        ...

    def cancel(self, request_id: str, dropped: Callable[[], None] = _ignore) -> None:
        """Drop a request at any stage; no call to its listener begins after this returns. `dropped` is called, on any
        thread, as soon as the engine has nothing of it in memory but what it holds for later requests: at once if the
        request has ended, or its id is unknown. It must not block."""
        ...

    def logits(self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None) -> list[list[float]]:
        """Like PrefillEngine.logits; with `kv`, which covers tokens[:-last], only the last tokens are computed."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV in the engine's own caches. Received KV, also of requests that wait to be ingested, is not
        included: the receiver counts it until it is released."""
        ...

    @property
    def running(self) -> int:
        """Requests in the engine, queued or decoding."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine's thread has ended, for any reason; no further request is served."""
        ...

    def close(self) -> None:
        """Stop the engine's thread; running requests get Cancelled."""
        ...
