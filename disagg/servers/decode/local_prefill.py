"""Whether a decode host computes the rest of a prompt itself, from measured speeds."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.requests import PrefillOffer
from disagg.units import counted, seconds

UNMEASURED_TOKENS = 32
"""While this host's speed is not measured, at most so many tokens are computed here: hardly more than one pass."""
MEASURED_TOKENS = 16
"""Shorter computations do not predict longer ones: their time is that of one pass through the weights."""
OVERHEAD_S = 0.01
"""To ask a prefill host, and to open the KV connection. Assumed for a local network."""
_WEIGHT = 0.7  # of all earlier measurements when a new one comes


@dataclass(frozen=True, slots=True)
class PrefillPlace:
    """local: compute here. reason: why, or why not."""

    local: bool
    reason: str


def choose_place(rest: int, offer: PrefillOffer | None, local_tokens_s: float | None, rest_bytes: int) -> PrefillPlace:
    """Where to compute the `rest` tokens of a prompt whose KV is missing, of `rest_bytes` bytes.

    local_tokens_s: this host's speed, None if not measured. Assumes that the prefill host computes the rest only, and
    sends while it computes.
    """
    if rest == 0:
        return PrefillPlace(True, "no token but the last is left to compute")
    if offer is None:
        return PrefillPlace(False, "no prefill host was offered")
    if local_tokens_s is None:
        few = rest <= UNMEASURED_TOKENS
        rule = f"until its speed is measured, this host computes up to {UNMEASURED_TOKENS} itself"
        return PrefillPlace(few, f"{counted(rest, 'token')} left to compute; {rule}")
    here = rest / local_tokens_s
    sending = rest_bytes / offer.link_bytes_s if offer.link_bytes_s else 0.0
    there = offer.wait_s + OVERHEAD_S + max(rest / offer.tokens_s, sending)
    times = f"{seconds(here)} here, {seconds(there)} on a prefill host"
    return PrefillPlace(here <= there, f"{counted(rest, 'token')} left to compute: {times}")


def sooner(*seconds: float | None) -> float | None:
    """The least of these; None if none of them is known."""
    return min((one for one in seconds if one is not None), default=None)


class Speed:
    """Tokens per second, as measured lately; earlier measurements fade."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def tokens_s(self) -> float | None:
        """None if nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def add(self, tokens: int, seconds: float) -> None:
        """One more measurement; it counts by its tokens."""
        self._tokens = self._tokens * _WEIGHT + tokens
        self._seconds = self._seconds * _WEIGHT + seconds
