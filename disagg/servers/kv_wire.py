"""In which form a prompt's KV goes to a decode host: what hosts.toml says, and where it leaves the choice, what pays.

Quantised KV is not exact, so "auto" takes it only where real transfers have shown that the link is what requests wait
for: where sending the prompt's KV as it is would take longer than computing it. How fast this host computes shows only
where the link keeps up, since else the computation waits for the link too; a link that always falls behind is enough.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from disagg.config import KVWire
from disagg.engines.base import PrefillTiming
from disagg.kv.layout import Layout
from disagg.kv.send import TransferResult
from disagg.kv.wire import AS_IS, INT8, WireForm

MARGIN = 1.25  # how much longer the transfer must be than the compute: rates are known to about a tenth
RATED_TOKENS = 512  # of a shorter prompt the speed says little about longer ones
FRESH_S = 600.0  # a link is measured anew after this, by transfers that go as they are
LEAST_SEEN = 2  # the first transfer to a decode host was seen at a quarter of the rate: its memory was fresh
MOST_SEEN = 8

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """What this host computes and what its link takes, as seen in real transfers; None where nothing has shown it.
    behind: the latest transfer over this link fell behind the computation."""

    tokens_s: float | None = None
    link_bytes_s: float | None = None
    behind: bool = False


def choose(wanted: KVWire, layout: Layout, tokens: int, rates: Rates) -> WireForm:
    """The form for the KV of a prompt of `tokens` tokens. Never a quantised one where that makes nothing smaller."""
    nbytes = layout.nbytes(tokens)
    if wanted == "as-is" or layout.nbytes(tokens, wire=INT8) == nbytes:
        return AS_IS
    if wanted == "int8":
        return INT8
    if rates.link_bytes_s is None:
        return AS_IS
    if rates.tokens_s is None:
        return INT8 if rates.behind else AS_IS
    return INT8 if nbytes / rates.link_bytes_s > MARGIN * tokens / rates.tokens_s else AS_IS


@dataclass(frozen=True, slots=True)
class _Seen:
    bytes_s: float
    ended: float  # time.monotonic()


class MeasuredRates:
    """The rates of recent transfers, by where they went: decode hosts of hosts.toml, a bounded number."""

    def __init__(self) -> None:
        self._tokens_s: float | None = None
        self._links: dict[Address, deque[_Seen]] = {}
        self._behind: dict[Address, bool] = {}

    def add(self, to: Address, timing: PrefillTiming, result: TransferResult) -> None:
        """Learn from a transfer that was acknowledged."""
        if timing.tokens >= RATED_TOKENS and timing.compute_s > 0:
            self._behind[to] = result.fell_behind
            if not result.fell_behind:
                self._tokens_s = timing.tokens / timing.compute_s
        if (rate := result.link_bytes_s) is not None:
            self._links.setdefault(to, deque(maxlen=MOST_SEEN)).append(_Seen(rate, result.acknowledged))

    def rates(self, to: Address, now: float | None = None) -> Rates:
        """What is known by `now` (time.monotonic()) of this host and its link to that one: the best it showed."""
        since = (time.monotonic() if now is None else now) - FRESH_S
        fresh = [seen.bytes_s for seen in self._links.get(to, ()) if seen.ended > since]
        return Rates(self._tokens_s, max(fresh) if len(fresh) >= LEAST_SEEN else None, self._behind.get(to, False))
