"""DecodeEngine: KV and the last token -> stream of tokens. It can also run a request alone, prompt and answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import numpy.typing

from disagg.api.sampling import Sampling
from disagg.engines.base.audit import AuditBounds, AuditFinding
from disagg.engines.base.values import Token
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.reference import EngineInfo
from disagg.engines.model.text import PromptTokenizer
from disagg.kv.received import ReceivedKV


@dataclass(slots=True)
class DecodeTiming:
    """The stages of one request on the decode host, as time.monotonic().

    submitted -> started: waiting for the engine's thread, at most one step of the batch and other requests' ingest.
    started -> ingested: building caches from the received KV, and its audit; close to 0 without KV.
    ingested -> first_token: its first step, together with the rest of the batch and a chunk of other requests' prompts.
    computed_prompt_tokens: prompt tokens that this host ran through the model for the answer: 1 after a hand-off, else
    all that were not held. audit: what was found, None if the KV was not audited. audit_s: what it took, of the time to
    `ingested`.
    """

    submitted: float = 0.0
    started: float = 0.0
    ingested: float = 0.0
    first_token: float = 0.0
    computed_prompt_tokens: int = 0
    audit: AuditFinding | None = None
    audit_s: float = 0.0


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
    from the first token on. audit: the bounds that `kv` is audited with, None: it is not. If it is over them, the
    request fails with KVRefuted.
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
    audit: AuditBounds | None = None


class Listener(Protocol):
    """Callbacks of a request, called on the engine's thread; they must not block. on_tokens: once per decode step."""

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None: ...

    def on_error(self, error: Exception) -> None: ...


def _ignore() -> None:
    pass


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
        """The longest held KV that a request with these tokens and this salt can go on from. It is shorter than
        `tokens`; None if there is none. Release it in any case. Callable from any thread."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of held KV; not part of `kv_bytes`."""
        ...

    def give_up_held(self, nbytes: int) -> None:
        """Drop at least `nbytes` of held KV, the least recently used first, if so much is not in use by a request.
        Callable from any thread."""
        ...

    def forget_held(self, tokens: Sequence[int], salt: str) -> None:
        """Drop what is held of this prompt, and of all that begin with the same tokens, because it may be wrong.
        Requests that use it go on. Callable from any thread."""
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

    def logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, *, chunk_tokens: int | None = None
    ) -> numpy.typing.NDArray[numpy.float32]:
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
