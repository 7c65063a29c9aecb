"""The test that a host passes before the next one is restarted: its answer to the fixed prompt is the recorded one.

Greedy tokens are compared one by one. The first that differs is allowed if the two were nearly as likely in the
recorded answer: rounding differs between kernels, batches and versions of libraries, and after such a tie the texts
differ rightly. How near is the tolerance of the host's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError

PROMPT: Final = "The first ten prime numbers are 2, 3, 5, 7, 11,"
TOKENS: Final = 16
ALTERNATIVES: Final = 5
TIE_NATS: Final = {"float32": 0.001, "float16": 0.1, "bfloat16": 0.25}
"""How much less likely the other token may be, as a difference of log-probabilities."""
QUANTIZED_TIE_NATS: Final = 0.5


class RecordedToken(NamedTuple):
    """A token, its log-probability, and the likeliest alternatives at its place, each with its own."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RecordedAnswer(msgspec.Struct, frozen=True):
    """The tokens that a host answered the fixed prompt with."""

    host: str
    tokens: tuple[RecordedToken, ...]


Ask = Callable[[Host], RecordedAnswer]
"""A host's answer to the fixed prompt, computed by that host alone. Raises DisaggError."""


@dataclass(frozen=True, slots=True)
class Gate:
    """recorded: answers by kind of host. Of a kind without one, the first answer becomes it. A gateway has no answer of
    its own, nor has a host with the first layers of a model: they pass if they are healthy. Of a host with several
    models those are tested that it loads at start, or its first."""

    ask: Ask
    recorded: dict[str, RecordedAnswer]

    def needs(self, host: Host) -> bool:
        """Whether no answer of the host's kind is recorded."""
        return kind(host) not in self.recorded

    def record(self, host: Host) -> None:
        """Record the host's answer. DisaggError if it gives none that others could be compared with."""
        answer = self.ask(host)
        if reason := unusable(answer):
            raise FleetError(f"{reason}, before the rollout", f"disagg logs --host {host.name}")
        self.recorded[kind(host)] = answer

    def test(self, host: Host) -> DisaggError | None:
        """Why the host does not pass."""
        try:
            answer = self.ask(host)
        except DisaggError as error:
            return error
        reason = difference(self.recorded.get(kind(host), answer), answer, tolerance(host))
        if reason:
            return FleetError(reason, f"disagg logs --host {host.name}")
        self.recorded.setdefault(kind(host), answer)
        return None


def with_answers(fleet: Fleet, host: Host) -> list[Host]:
    """What of a host of hosts.toml has an answer that is tested."""
    chosen = host.keeping.preload if host.keeping is not None else ()
    found = [one for one in fleet.run_by(host) if one.model in (chosen or host.all_models[:1])]
    return [one for one in found if one.answers]


def kind(host: Host) -> str:
    """Hosts of one kind give the same answer: model, engine, dtype and quantization."""
    engine = host.engine
    return " ".join(filter(None, (host.model, engine.name, engine.dtype, engine.quantization)))


def tolerance(host: Host) -> float:
    """How much less likely another token may be on this host, in nats."""
    return QUANTIZED_TIE_NATS if host.engine.quantization else TIE_NATS.get(host.engine.dtype, QUANTIZED_TIE_NATS)


def unusable(answer: RecordedAnswer) -> str:
    """What is wrong with an answer that nothing is compared with, "" if nothing is."""
    if len(answer.tokens) != TOKENS:
        return f"{answer.host} answered {len(answer.tokens)} tokens instead of {TOKENS}"
    wrong = [number for number, token in enumerate(answer.tokens, 1) if not math.isfinite(token.logprob)]
    return f"{answer.host}: the log-probability of token {wrong[0]} is not a number" if wrong else ""


def difference(recorded: RecordedAnswer, answer: RecordedAnswer, tie_nats: float) -> str:
    """How the answer differs from the recorded one, "" if it is the same or both had nearly the same choice."""
    if reason := unusable(answer):
        return reason
    for number, (before, now) in enumerate(zip(recorded.tokens, answer.tokens, strict=False), 1):
        if now.id == before.id:
            continue
        behind = before.logprob - dict(before.top).get(now.id, -math.inf)
        if behind <= tie_nats:
            return ""
        less = f"{behind:.2g} nats less likely" if math.isfinite(behind) else "not among the likeliest"
        return (
            f"{answer.host} answers {now.id} as token {number}, where {recorded.host} answered {before.id} before "
            f"the rollout; there it was {less}, and {tie_nats:g} nats are allowed"
        )
    return ""
