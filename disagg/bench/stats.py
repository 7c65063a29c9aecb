"""The figures of the requests that a benchmark has recorded: spreads, rates, goodput. Pure.

The keys are those of `vllm bench serve` if it has the figure; `_ms` marks milliseconds. A figure that was not measured
is None: if nothing completed, or TPOT of answers with one token.

TTFT = request sent -> first token received.  E2EL = sent -> last token received.
in tok/s = prompt tokens / TTFT, per request: how fast a prompt is read, as its caller sees it.
TPOT = (E2EL - TTFT) / (output tokens - 1), per request.  ITL = every gap between tokens, pooled over requests.
goodput = requests per second that meet all stated limits.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from disagg.api.names import AS_IS
from disagg.bench.beside import BesideFigures
from disagg.bench.records import Record
from disagg.inference.metrics import Metrics, TTFTParts

PERCENTILES = (50, 90, 95, 99)
LIMITS = ("ttft", "tpot", "itl", "e2el")
PART_NAMES = tuple(part.name for part in fields(TTFTParts))
_RESAMPLES = 1000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are distributed, in milliseconds; None if there are none. std is of the population."""

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def to_json(self, name: str) -> dict[str, float | None]:
        return {f"{key}_{name}_ms": value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of the requests of one mode at one point. duration: seconds of its turns.

    prompt_throughput: median of prompt tokens / TTFT. mean_layers: that a prefill host computed; None if every request
    was handed over or answered alone. beside: of the answers that ran beside; None if none did.
    request_goodput: None without limits. mean_...: of the requests that completed; the parts add up to the mean TTFT.
    joules_per_request: None if a machine's power is unknown or nothing completed.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    prompt_throughput: float | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    mean_ttft_parts_ms: Mapping[str, float | None]
    mean_prefill_ms: float | None
    mean_hidden_transfer_ms: float | None
    mean_exposed_transfer_ms: float | None
    quantised_kv_requests: int
    total_kv_bytes: int
    decode_computed_tokens: int
    fallbacks: int
    errors_by_kind: Mapping[str, int]
    max_send_lag_ms: float
    mean_layers: float | None = None
    beside: BesideFigures | None = None
    joules_per_request: float | None = None
    energy_source: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Flat, the spreads by the keys of `vllm bench serve`."""
        body: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            body |= value.to_json(field.name) if isinstance(value, Spread) else {field.name: value}
        return body | {"beside": self.beside.to_json() if self.beside is not None else None}


LATENCIES: Mapping[str, Callable[[Figures], float | None]] = {
    "TTFT p50": lambda figures: figures.ttft.median,
    "TTFT p99": lambda figures: figures.ttft.p99,
    "TPOT p50": lambda figures: figures.tpot.median,
    "ITL p99": lambda figures: figures.itl.p99,
    "E2E p50": lambda figures: figures.e2el.median,
    "E2E p99": lambda figures: figures.e2el.p99,
}
"""The latencies that tables show, in milliseconds, by their heads."""


def summary(records: Sequence[Record], duration: float, limits: Mapping[str, float] | None = None) -> Figures:
    """The figures of the requests of one mode at one point, without their energy. duration: seconds of its turns.

    limits: milliseconds by name (LIMITS). A request is good if it exceeds none; for ITL its mean is compared.
    """
    done = [record.metrics for record in records if record.metrics is not None]
    good = sum(record.ok and meets(record, limits) for record in records) if limits else None
    inputs, outputs = sum(one.prompt_tokens for one in done), sum(one.completion_tokens for one in done)
    parts = [asdict(one.ttft_parts) for one in done]
    return Figures(
        duration=duration,
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=_per_second(len(done), duration),
        request_goodput=None if good is None else _per_second(good, duration),
        output_throughput=_per_second(outputs, duration),
        total_token_throughput=_per_second(inputs + outputs, duration),
        prompt_throughput=statistics.median(one.prompt_tokens / one.ttft for one in done) if done else None,
        ttft=spread([one.ttft for one in done]),
        tpot=spread([value for one in done if (value := tpot(one)) is not None]),
        itl=spread([gap for record in records if record.ok for gap in record.itl]),
        e2el=spread([one.total_time for one in done]),
        mean_ttft_parts_ms={name: _mean_ms([part[name] for part in parts]) for name in PART_NAMES},
        mean_prefill_ms=_mean_ms([one.prefill_time for one in done]),
        mean_hidden_transfer_ms=_mean_ms([one.hidden_transfer for one in done]),
        mean_exposed_transfer_ms=_mean_ms([one.exposed_transfer for one in done]),
        quantised_kv_requests=sum(one.kv_wire not in (None, AS_IS) for one in done),
        total_kv_bytes=sum(one.kv_bytes for one in done),
        decode_computed_tokens=sum(one.decode_computed_tokens for one in done),
        fallbacks=sum(record.fell_back for record in records),
        errors_by_kind=dict(Counter(record.error for record in records if record.error)),
        max_send_lag_ms=max((record.sent - record.due for record in records), default=0.0) * 1e3,
        mean_layers=_mean([float(one.layers) for one in done if one.layers is not None]),
    )


def spread(values: Sequence[float]) -> Spread:
    """The distribution of these seconds, in milliseconds."""
    if not values:
        return Spread()
    return Spread(
        statistics.fmean(values) * 1e3,
        statistics.median(values) * 1e3,
        statistics.pstdev(values) * 1e3,
        *(percentile(values, p) * 1e3 for p in PERCENTILES),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def tpot(metrics: Metrics) -> float | None:
    """Seconds per output token after the first; None if there is only one."""
    if metrics.completion_tokens < 2:
        return None
    return (metrics.total_time - metrics.ttft) / (metrics.completion_tokens - 1)


def meets(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether a completed request is within all limits (milliseconds). A single output token has TPOT and ITL 0."""
    assert record.metrics is not None
    figures = {
        "ttft": record.metrics.ttft,
        "tpot": tpot(record.metrics) or 0.0,
        "itl": statistics.fmean(record.itl) if record.itl else 0.0,
        "e2el": record.metrics.total_time,
    }
    return all(figures[name] * 1e3 <= limit for name, limit in limits.items())


def ratio_of_medians(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """median(above) / median(below), its interval by the percentile bootstrap."""
    dice = random.Random(seed)
    value = statistics.median(above) / statistics.median(below)
    drawn = sorted(
        statistics.median(dice.choices(above, k=len(above))) / statistics.median(dice.choices(below, k=len(below)))
        for _ in range(_RESAMPLES)
    )
    edge = (1 - _CONFIDENCE) / 2 * 100
    return Interval(value, percentile(drawn, edge), percentile(drawn, 100 - edge))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean_ms(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) * 1e3 if values else None


def _per_second(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0
