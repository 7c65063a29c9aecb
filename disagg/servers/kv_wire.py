"""In which form a prompt's KV goes to a decode host: what hosts.toml says, and where it leaves the choice, what pays.

Quantised KV is not exact, so "auto" takes it only where real transfers have shown that the link is what requests wait
for: where sending the prompt's KV as it is would take longer than computing it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from disagg.config import KVWire
from disagg.engines.base import PrefillTiming
from disagg.kv.layout import Layout
from disagg.kv.send import TransferResult
from disagg.kv.wire import AS_IS, INT8, WireForm

MARGIN = 1.25  # how much longer the transfer must be than the compute: rates are known to about a tenth
RATED_TOKENS = 512  # of a shorter prompt the speed says little about longer ones
FRESH_S = 600.0  # a link is measured anew after this, by a transfer that goes as it is

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """What this host computes and what its link takes, as seen in real transfers; None where nothing has shown it."""

    tokens_s: float | None = None
    link_bytes_s: float | None = None


def choose(wanted: KVWire, layout: Layout, tokens: int, rates: Rates) -> WireForm:
    """The form for the KV of a prompt of `tokens` tokens. Never a quantised one where that makes nothing smaller."""
    nbytes = layout.nbytes(tokens)
    if wanted == "as-is" or layout.nbytes(tokens, wire=INT8) == nbytes:
        return AS_IS
    if wanted == "int8":
        return INT8
    if rates.tokens_s is None or rates.link_bytes_s is None:
        return AS_IS
    return INT8 if nbytes / rates.link_bytes_s > MARGIN * tokens / rates.tokens_s else AS_IS


class SeenRates:
    """The rates of the latest transfers, by where they went: decode hosts of hosts.toml, a bounded number."""

    def __init__(self) -> None:
        self._tokens_s: float | None = None
        self._links: dict[Address, tuple[float, float]] = {}  # bytes per second, and time.monotonic() of its end

    def note(self, to: Address, timing: PrefillTiming, result: TransferResult) -> None:
        """Learn from a transfer that was acknowledged. What the link held up is no part of the compute."""
        compute_s = timing.compute_s - result.held_up_s
        if timing.tokens >= RATED_TOKENS and compute_s > 0:
            self._tokens_s = timing.tokens / compute_s
        if result.link_bytes_s is not None:
            self._links[to] = result.link_bytes_s, result.acknowledged

    def rates(self, to: Address, now: float | None = None) -> Rates:
        """What is known by `now` (time.monotonic()) of this host and its link to that one."""
        link = self._links.get(to)
        fresh = link is not None and (time.monotonic() if now is None else now) - link[1] < FRESH_S
        return Rates(self._tokens_s, link[0] if link is not None and fresh else None)
