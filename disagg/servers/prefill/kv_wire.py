"""The form in which a prompt's KV is sent to a decode host: what hosts.toml sets, or for "auto" the faster one.

Quantised KV is not exact, so "auto" chooses it only if measured transfers show that requests wait for the link: sending
the prompt's KV as-is would take longer than computing it. The link does not slow the computation down, so that the rate
of the one says nothing about the other.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from disagg.api.layout import Layout
from disagg.api.names import AS_IS, INT8, WireForm
from disagg.engines.base import PrefillTiming
from disagg.kv.sent import SentKV

MARGIN = 1.25  # how much longer the transfer must be than the compute: rates are known to about a tenth
RATED_TOKENS = 512  # the speed of a shorter prompt does not predict that of longer ones
FRESH_S = 600.0  # older measurements are ignored, so that as-is transfers measure the link again
MIN_TRANSFERS = 2  # the first transfer to a decode host ran at a quarter of the rate: its memory was not touched yet
MAX_TRANSFERS = 8

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of this host's computation and of one link; None if not measured yet."""

    tokens_s: float | None = None
    link_bytes_s: float | None = None


def choose_form(wanted: WireForm | Literal["auto"], layout: Layout, tokens: int, rates: Rates) -> WireForm:
    """The form for the KV of a prompt of `tokens` tokens. Never a quantised form that is not smaller."""
    nbytes = layout.nbytes(tokens)
    if wanted == AS_IS or layout.nbytes(tokens, wire=INT8) == nbytes:
        return AS_IS
    if wanted == INT8:
        return INT8
    if rates.link_bytes_s is None or rates.tokens_s is None:
        return AS_IS
    return INT8 if nbytes / rates.link_bytes_s > MARGIN * tokens / rates.tokens_s else AS_IS


@dataclass(frozen=True, slots=True)
class _Measurement:
    bytes_s: float
    ended: float  # time.monotonic()


class MeasuredRates:
    """The rates of recent transfers, by destination: decode hosts of hosts.toml, a bounded number."""

    def __init__(self) -> None:
        self._tokens_s: float | None = None
        self._links: dict[Address, deque[_Measurement]] = {}

    def add(self, to: Address, timing: PrefillTiming, sent: SentKV) -> None:
        """Record a transfer that was acknowledged."""
        if timing.tokens >= RATED_TOKENS and timing.compute_s > 0:
            self._tokens_s = timing.tokens / timing.compute_s
        if (rate := sent.link_bytes_s) is not None:
            self._links.setdefault(to, deque(maxlen=MAX_TRANSFERS)).append(_Measurement(rate, sent.acknowledged))

    def rates(self, to: Address, now: float | None = None) -> Rates:
        """The rates at `now` (time.monotonic()): the best of the link's recent transfers."""
        since = (time.monotonic() if now is None else now) - FRESH_S
        fresh = [one.bytes_s for one in self._links.get(to, ()) if one.ended > since]
        return Rates(self._tokens_s, max(fresh) if len(fresh) >= MIN_TRANSFERS else None)

    def links(self, now: float | None = None) -> dict[str, float]:
        """The rate of each link that is known at `now`, by "address:port"."""
        known = {f"{host}:{port}": self.rates((host, port), now).link_bytes_s for host, port in list(self._links)}
        return {name: rate for name, rate in known.items() if rate is not None}
