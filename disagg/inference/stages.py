"""What a request is doing before its answer is complete, as its client sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from disagg.inference.attempts import Attempt
from disagg.inference.metrics import Method

Phase = Literal["queue", "prefill", "transfer", "decode"]
"""queue: waiting for a host. prefill: the prompt is computed; its KV crosses meanwhile. transfer: the prompt is
computed, its KV is not yet there. decode: the answer is generated."""

_PHASES: Final[Mapping[str, Phase]] = {
    "tokenising": "queue",
    "queued": "queue",
    "computing the prompt": "prefill",
    "sending KV": "transfer",
    "generating": "decode",
}
"""By the phase that a host's progress event states. "waiting for KV" is left out: the prefill host says more."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a request is. prompt_tokens, held_tokens: 0 until the decode host has counted them."""

    phase: Phase
    method: Method
    prefill_server: str | None
    decode_server: str | None
    prompt_tokens: int = 0
    held_tokens: int = 0


Watch = Callable[[Stage], None]
"""Is called whenever a request comes to another stage, on the event loop. It must not raise."""


def unwatched(_: Stage) -> None:
    """For requests that nobody watches."""


def phase_of(reported: str) -> Phase | None:
    """The phase of a request whose host reports this one; None if that says nothing new."""
    return _PHASES.get(reported)


def stage_of(attempt: Attempt, phase: Phase, prompt_tokens: int = 0, held_tokens: int = 0) -> Stage:
    """The stage of a request that performs this attempt."""
    prefill = attempt.prefill.name if attempt.prefill else None
    decode = attempt.decode.name if attempt.decode else None
    return Stage(phase, attempt.method, prefill, decode, prompt_tokens, held_tokens)
