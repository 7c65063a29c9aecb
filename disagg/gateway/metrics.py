"""What /metrics shows: figures of the requests that have ended, for Prometheus.

A figure that means the same as one of vLLM's has its name. All are by model; none is by client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from disagg.gateway.problems import Problem
from disagg.inference.metrics import Metrics
from disagg.inference.types import Completion

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TPOT_S: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST_S: Final = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
TOKENS: Final = tuple(float(count * 10**power) for power in range(6) for count in (1, 2, 5))


class GatewayMetrics:
    """The figures of one gateway since it started."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._running = self._gauge("disagg_requests_running", "Requests that are being answered")
        self._requests = self._counter("disagg_requests", "Answers by the way they came about", "method")
        self._errors = self._counter("disagg_request_errors", "Requests that failed or were refused", "code")
        self._cancelled = self._counter("disagg_requests_cancelled", "Requests whose callers disconnected")
        self._success = self._counter("vllm:request_success", "Complete answers", "finished_reason")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens for which held KV was looked up")
        self._held = self._counter("vllm:prefix_cache_hits", "Prompt tokens whose KV the decode host held")
        self._resumed = self._counter("disagg_resumed_answers", "Answers that another host went on with")
        self._bytes = self._counter("disagg_handoff_bytes", "KV moved from prefill to decode hosts")
        self._transfer = self._counter(
            "disagg_transfer_seconds", "KV transfer while the prompt was computed, and after it", "when"
        )
        self._parts = self._counter("disagg_ttft_part_seconds", "Where the time to the first token went", "part")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to the first token", TTFT_S)
        self._tpot = self._histogram("vllm:request_time_per_output_token_seconds", "Time per output token", TPOT_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Request sent until its last token", REQUEST_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting for an engine", REQUEST_S)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token until last token", REQUEST_S)
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Tokens of an answer", TOKENS)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def started(self, model: str) -> None:
        self._running.labels(model).inc()

    def ended(self, model: str, completions: Sequence[Completion], problem: Problem | None, *, cancelled: bool) -> None:
        """Count a request that has ended, with those of its answers that are complete."""
        self._running.labels(model).dec()
        if problem is not None:
            self.refused(model, problem)
        elif cancelled:
            self._cancelled.labels(model).inc()
        for completion in completions:
            self._success.labels(model, completion.finish_reason).inc()
            self._count(model, completion.metrics)
            self._observe(model, completion.metrics)

    def refused(self, model: str, problem: Problem) -> None:
        """Count an error. model: empty if the request did not get far enough to name one of the fleet's."""
        self._errors.labels(model, problem.code or str(problem.status)).inc()

    def _count(self, model: str, metrics: Metrics) -> None:
        self._requests.labels(model, metrics.method).inc()
        self._prompt.labels(model).inc(metrics.prompt_tokens)
        self._generated.labels(model).inc(metrics.completion_tokens)
        self._queried.labels(model).inc(metrics.prompt_tokens)
        self._held.labels(model).inc(metrics.held_tokens)
        self._resumed.labels(model).inc(metrics.resumed_tokens > 0)
        self._bytes.labels(model).inc(metrics.kv_bytes)
        self._transfer.labels(model, "hidden").inc(metrics.hidden_transfer)
        self._transfer.labels(model, "exposed").inc(max(0.0, metrics.exposed_transfer))
        for part, seconds in asdict(metrics.ttft_parts).items():
            self._parts.labels(model, part).inc(max(0.0, seconds))

    def _observe(self, model: str, metrics: Metrics) -> None:
        self._ttft.labels(model).observe(metrics.ttft)
        self._e2e.labels(model).observe(metrics.total_time)
        self._queue.labels(model).observe(metrics.ttft_parts.queue)
        self._decode.labels(model).observe(metrics.decode_time)
        self._prompts.labels(model).observe(metrics.prompt_tokens)
        self._answers.labels(model).observe(metrics.completion_tokens)
        if metrics.completion_tokens > 1:
            self._tpot.labels(model).observe((metrics.total_time - metrics.ttft) / (metrics.completion_tokens - 1))

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, ("model_name", *labels), registry=self._registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, ("model_name",), registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, meaning, ("model_name",), registry=self._registry, buckets=buckets)
