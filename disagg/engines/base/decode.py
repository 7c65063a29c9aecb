"""A request to a decode engine, and what its listener hears of it: tokens, and what they took."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from disagg.api.events import FinishReason
from disagg.api.sampling import Sampling
from disagg.engines.base.audit import AuditBounds, AuditFinding
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.prefix_cache import PinnedPrefix
from disagg.kv.arriving import ArrivingKV
from disagg.kv.received import ReceivedKV


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. top: (id, logprob) of the likeliest tokens, if requested.
    finish: set on the last token of a request: "stop" for an end-of-sequence token, "length" at max_tokens."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


@dataclass(slots=True)
class DecodeTiming:
    """The stages of one request on the decode host, as time.monotonic().

    submitted -> started: waiting for the engine's thread, at most one step of the batch and other requests' ingest.
    started -> ingested: building caches from the received KV, and its audit; close to 0 without KV. Of KV that arrives,
    also the wait for it and the layers that are computed meanwhile.
    ingested -> first_token: its first step, together with the rest of the batch and a chunk of other requests' prompts.
    computed_prompt_tokens: prompt tokens that this host ran through the model for the answer: 1 after a hand-off, else
    all that were not held. audit: what was found, None if the KV was not audited. audit_s: what it took, of the time to
    `ingested`. Of a split: tail_compute_s: what the layers of this host took. tail_s: from the acceptance of the last
    chunk to the KV of all layers. resumed_at: the tokens that had arrived whole when the head failed, after which this
    host computed all layers; None: it did not fail.
    """

    submitted: float = 0.0
    started: float = 0.0
    ingested: float = 0.0
    first_token: float = 0.0
    computed_prompt_tokens: int = 0
    audit: AuditFinding | None = None
    audit_s: float = 0.0
    tail_s: float = 0.0
    tail_compute_s: float = 0.0
    resumed_at: int | None = None


HeldKV = PinnedPrefix[Any, Any]
"""KV of a prompt's first `tokens` tokens, kept from a finished request."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One request to a DecodeEngine.

    tokens: the prompt, and the first `answered` tokens of the answer if it goes on after them; they count in
    sampling.max_tokens. held: from `find_held` for these tokens and this salt. kv: KV of tokens [held.tokens or 0,
    len(tokens) - 1); None: the engine computes what is not held. arriving: in place of `kv`, KV of the prompt's first
    layers that may still arrive: the engine computes the other layers meanwhile, and all that does not arrive. salt:
    only requests with the same salt share held KV. constraint: the form that the answer must have, after the tokens
    that are given. bad_words: token sequences that it must not have. hold_prompt: hold the received KV from the first
    token on. audit: the bounds that `kv` is audited with, None: it is not. If it is over them, the request fails with
    KVRefuted.
    """

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    kv: ReceivedKV | None = None
    held: HeldKV | None = None
    answered: int = 0
    salt: str = ""
    constraint: Constraint | None = None
    bad_words: Sequence[Sequence[int]] = ()
    hold_prompt: bool = False
    audit: AuditBounds | None = None
    arriving: ArrivingKV | None = None


class Listener(Protocol):
    """Callbacks of a request, called on the engine's thread; they must not block. on_tokens: once per decode step."""

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Collector:
    """A Listener that collects a whole answer. tokens: so far. timing: of the answer, once it has ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.timing: Future[DecodeTiming] = Future()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.tokens += [token.id for token in tokens]
        if tokens[-1].finish:
            self.timing.set_result(timing)

    def on_error(self, error: Exception) -> None:
        self.timing.set_exception(error)
