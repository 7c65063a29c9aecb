"""What /metrics shows of requests, for Prometheus. A figure that means the same as one of vLLM's has its name and the
bounds of its buckets, so that vLLM's dashboards fit."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, product
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from disagg.api.events import FinishReason
from disagg.api.gateway import ENDED_HOSTS
from disagg.gateway.dialects.problems import FAILURES, Problem
from disagg.gateway.watch.request import ObservedRequest, Observer
from disagg.inference.attempt import Method
from disagg.inference.metrics import Metrics, TTFTParts
from disagg.strikes import POLICY

TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TPOT_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
)
TOKENS: Final = tuple(float(count * 10**power) for power in range(6) for count in (1, 2, 5))
MAX_HARMFUL: Final = 16
KV_LOST: Final = "KV did not arrive"
FALLBACKS: Final = (KV_LOST, "prefill failed", "no prefill host is up", "decode host failed", "no decode host is left")
"""Why an answer came about without its hand-off: this, or the reason of its attempt."""
BOUNDS = [*(str(bound) for bound in TPOT_S), "+Inf"]


_COUNTED: Final[Mapping[str, tuple[str, Callable[[Metrics], float]]]] = {
    "vllm:prompt_tokens": ("Prompt tokens", lambda one: one.prompt_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens for which held KV was looked up", lambda one: one.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens whose KV the decode host held", lambda one: one.held_tokens),
    "disagg_resumed_answers": ("Answers that another host went on with", lambda one: one.resumed_tokens > 0),
    "disagg_handoff_bytes": ("KV moved from prefill to decode hosts", lambda one: one.kv_bytes),
}
_OBSERVED: Final[Mapping[str, tuple[str, Sequence[float], Callable[[Metrics], float | None]]]] = {
    "vllm:time_to_first_token_seconds": ("Time to the first token", TTFT_S, lambda one: one.ttft),
    "vllm:request_time_per_output_token_seconds": (
        "Time per output token",
        TPOT_S,
        lambda one: (one.total_time - one.ttft) / (count - 1) if (count := one.completion_tokens) > 1 else None,
    ),
    "vllm:e2e_request_latency_seconds": ("Request sent until its last token", REQUEST_S, lambda one: one.total_time),
    "vllm:request_queue_time_seconds": (
        "Waiting for an engine",
        REQUEST_S,
        lambda one: None if one.method == "whole" else one.ttft_parts.queue,
    ),
    "vllm:request_prefill_time_seconds": (
        "Computing the prompt",
        REQUEST_S,
        lambda one: None if one.method == "whole" else one.prefill_time,
    ),
    "vllm:request_decode_time_seconds": ("First token until last token", REQUEST_S, lambda one: one.decode_time),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request", TOKENS, lambda one: one.prompt_tokens),
    "vllm:request_generation_tokens": ("Tokens of an answer", TOKENS, lambda one: one.completion_tokens),
}
"""None: not observed. A whole-request host states neither of two times."""


class RequestMetrics(Observer):
    """The figures of one gateway's requests since it started.

    harmful: gets what names keys and requests, which not every key may see; `registry` the rest. Figures of `models`
    are 0 from the start, but disagg_routes_total, whose labels are pairs of hosts: Prometheus' rate() does not see the
    step of a figure that begins with 1.
    """

    def __init__(self, registry: CollectorRegistry, models: Sequence[str], harmful: HarmfulRequests) -> None:
        self._registry, self._harmful = registry, harmful
        self._of_models: list[tuple[Counter | Histogram, Sequence[Sequence[str]]]] = []
        self._requests = self._counter("disagg_requests", "Answers by the way they came about", method=get_args(Method))
        pair = ("model_name", "prefill_server", "decode_server")
        self._routes = Counter("disagg_routes", "Answers by their hosts", pair, registry=registry)
        without = "Answers whose hand-off failed, by the cause"
        self._fallbacks = self._counter("disagg_fallbacks", without, reason=FALLBACKS)
        self._errors = self._counter("disagg_request_errors", "Requests that failed or were refused", code=FAILURES)
        self._cancelled = self._counter("disagg_requests_cancelled", "Requests whose callers disconnected")
        reasons = get_args(FinishReason)
        self._success = self._counter("vllm:request_success", "Complete answers", finished_reason=reasons)
        self._counted = [(self._counter(name, meaning), value) for name, (meaning, value) in _COUNTED.items()]
        during = "KV transfer while the prompt was computed, and after it"
        self._transfer = self._counter("disagg_transfer_seconds", during, when=("hidden", "exposed"))
        parts = [part.name for part in fields(TTFTParts)]
        self._parts = self._counter("disagg_ttft_part_seconds", "Where the time to the first token went", part=parts)
        self._observed = [
            (self._histogram(name, meaning, buckets), value) for name, (meaning, buckets, value) in _OBSERVED.items()
        ]
        self._tokens = TokenMetrics()
        registry.register(self._tokens)
        self.begin(models)

    def begin(self, models: Iterable[str]) -> None:
        """State the figures of these models from now on: they are 0, unless there are some already."""
        for figure, known in self._of_models:
            for labels in product(models, *known):
                figure.labels(*labels)
        self._tokens.begin(models)

    def generated(self, request: ObservedRequest, choice: int, tokens: int) -> None:
        self._tokens.arrived(request.model, tokens, request.answers[choice].gap)

    def completed(self, request: ObservedRequest, choice: int) -> None:
        model, answer = request.model, request.answers[choice]
        self._success.labels(model, answer.done.finish_reason).inc()
        if answer.fell_back:
            reason = answer.stage.reason if answer.stage else "first choice"
            self._fallbacks.labels(model, KV_LOST if reason == "first choice" else reason).inc()
        self._count(model, answer.done.metrics)

    def ended(self, request: ObservedRequest) -> None:
        if request.problem is not None:
            self._problem(request.model, request.problem)
            if request.problem.code == ENDED_HOSTS:
                self._harmful.add(request)
        elif request.state == "cancelled":
            self._cancelled.labels(request.model).inc()

    def refused(self, problem: Problem) -> None:
        self._problem("", problem)

    def _problem(self, model: str, problem: Problem) -> None:
        self._errors.labels(model, problem.code or str(problem.status)).inc()

    def _count(self, model: str, metrics: Metrics) -> None:
        self._requests.labels(model, metrics.method).inc()
        self._routes.labels(model, metrics.prefill_server or "", metrics.decode_server or "").inc()
        self._transfer.labels(model, "hidden").inc(metrics.hidden_transfer)
        self._transfer.labels(model, "exposed").inc(max(0.0, metrics.exposed_transfer))
        for part, seconds in asdict(metrics.ttft_parts).items():
            self._parts.labels(model, part).inc(max(0.0, seconds))
        for counter, count in self._counted:
            counter.labels(model).inc(count(metrics))
        for histogram, observed in self._observed:
            if (value := observed(metrics)) is not None:
                histogram.labels(model).observe(value)

    def _counter(self, name: str, meaning: str, **known: Sequence[str]) -> Counter:
        """known: the values of a label."""
        counter = Counter(name, meaning, ("model_name", *known), registry=self._registry)
        self._of_models.append((counter, list(known.values())))
        return counter

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, meaning, ("model_name",), registry=self._registry, buckets=buckets)
        self._of_models.append((histogram, ()))
        return histogram


class TokenMetrics:
    """Tokens of answers as they arrive, and the time between them: a collector for prometheus_client.

    Counted as plain numbers, in 1.0 microseconds of CPU for each token of a request; prometheus-client's own counters
    take 2.5, most of it for locks that one event loop does not need. It is read on the event loop, too.
    """

    def __init__(self) -> None:
        self._models: dict[str, _OfModel] = {}

    def begin(self, models: Iterable[str]) -> None:
        """Count these models from 0 on, unless they are counted."""
        for model in models:
            self._models.setdefault(model, _OfModel())

    def arrived(self, model: str, tokens: int, gap: float | None) -> None:
        """Tokens that arrive together share the time since those before them."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = _OfModel()
        counts.tokens += tokens
        if gap is not None:
            counts.gaps[bisect_left(TPOT_S, gap / tokens)] += tokens
            counts.seconds += gap

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


class HarmfulRequests:
    """A collector for prometheus_client: the requests that ended hosts lately, with their keys. Each is stated for as
    long as it is refused."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str, str], float] = {}  # when, by its labels: two requests may have one id

    def add(self, request: ObservedRequest) -> None:
        """This request was refused because hosts have ended with it."""
        labels = (request.model, request.key or "", request.head.request_id)
        self._recent.pop(labels, None)
        self._recent[labels] = time.monotonic()
        for oldest in list(self._recent)[:-MAX_HARMFUL]:
            del self._recent[oldest]

    def collect(self) -> Iterable[Metric]:
        labels = ("model_name", "key", "request_id")
        figure = GaugeMetricFamily("disagg_request_ended_hosts", "Requests that ended hosts lately", labels=labels)
        oldest = time.monotonic() - POLICY.refused_s
        for found, at in self._recent.items():
            if at >= oldest:
                figure.add_metric(found, 1.0)
        return [figure]


@dataclass(slots=True)
class _OfModel:
    """tokens: that have arrived. gaps: how many lie in each bucket, the last without a bound. seconds: their sum."""

    tokens: int = 0
    gaps: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    seconds: float = 0.0
