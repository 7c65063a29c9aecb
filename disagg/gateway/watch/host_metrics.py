"""Gauges of hosts and models, computed from the live view whenever they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from disagg.api.gateway import LiveHost
from disagg.api.keeper import EVICTION_REASONS

_HOST_GAUGES: Final[Mapping[str, tuple[str, Callable[[LiveHost], float]]]] = {
    "disagg_host_up": ("1 if the host takes requests, else 0", lambda host: host.state == "up"),
    "disagg_host_requests_waiting": ("Requests that wait on the host", lambda host: host.queue),
    "disagg_host_requests_running": ("Requests that run on the host", lambda host: host.running),
    "disagg_host_kv_bytes": ("KV that requests have reserved", lambda host: host.kv_bytes),
    "disagg_host_kv_held_bytes": ("KV of finished conversations", lambda host: host.kv_held_bytes),
    "disagg_host_kv_limit_bytes": ("The bound on both", lambda host: host.kv_limit),
}


class LiveCollector:
    """A collector for prometheus_client.

    models, hosts: as they are now. requests: of a model that run and that wait, in this gateway.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[str]],
        hosts: Callable[[], Sequence[LiveHost]],
        requests: Callable[[str], tuple[int, int]],
    ) -> None:
        self._models, self._hosts, self._requests = models, hosts, requests

    def collect(self) -> Iterator[Metric]:
        hosts = self._hosts()
        yield from self._of_models(hosts)
        for name, (meaning, value) in _HOST_GAUGES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=("host", "role", "model_name"))
            for host in hosts:
                gauge.add_metric((host.name, host.role, host.model), float(value(host)))
            yield gauge
        yield from _audits(hosts)
        yield from _kept(hosts)

    def _of_models(self, hosts: Sequence[LiveHost]) -> Iterator[GaugeMetricFamily]:
        labels = ("model_name",)
        requests = GaugeMetricFamily("disagg_requests_running", "Requests that are being answered", labels=labels)
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests that are computed", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait in a queue", labels=labels)
        used = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the decode hosts' KV memory that requests use, 0 to 1", labels=labels
        )
        for model in self._models():
            active, queued = self._requests(model)
            requests.add_metric((model,), active + queued)
            running.add_metric((model,), active)
            waiting.add_metric((model,), queued)
            decode = [host for host in hosts if host.model == model and host.role == "decode"]
            limit = sum(host.kv_limit for host in decode)
            used.add_metric((model,), sum(host.kv_bytes for host in decode) / max(1, limit))
        return iter((requests, running, waiting, used))


def _audits(hosts: Sequence[LiveHost]) -> Iterator[Metric]:
    """What each decode host has found of the KV of each prefill host since it started."""
    labels = ("host", "sender", "model_name")
    verdicts = CounterMetricFamily("disagg_kv_audits", "Audited hand-offs", labels=(*labels, "verdict"))
    deviation = GaugeMetricFamily(
        "disagg_kv_deviation", "What the last KV that was right differed by, as a share of its bound", labels=labels
    )
    for host in hosts:
        for sender, found in host.senders.items():
            pair = (host.name, sender, host.model)
            verdicts.add_metric((*pair, "accepted"), found.accepted)
            verdicts.add_metric((*pair, "refuted"), found.refuted)
            if found.deviation is not None:
                deviation.add_metric(pair, found.deviation)
    return iter((verdicts, deviation))


def _kept(hosts: Sequence[LiveHost]) -> Iterator[Metric]:
    """What the keepers of hosts with several models state of each, since they started."""
    labels = ("host", "role", "model_name")
    loads = CounterMetricFamily("disagg_model_loads", "Loads of a model", labels=labels)
    load_s = GaugeMetricFamily("disagg_model_load_seconds", "What its last load took", labels=labels)
    gone = CounterMetricFamily("disagg_model_evictions", "Unloads of a model, by cause", labels=(*labels, "reason"))
    loaded = GaugeMetricFamily("disagg_model_loaded", "1 if it is loaded, else 0", labels=labels)
    memory = GaugeMetricFamily("disagg_model_memory_bytes", "Memory of a model that is loaded", labels=labels)
    for host in hosts:
        kept = host.kept
        if kept is None:
            continue
        at, here = (host.name, host.role, host.model), kept.state in ("ready", "draining")
        loads.add_metric(at, kept.loads)
        loaded.add_metric(at, float(here))
        memory.add_metric(at, float(kept.resident_bytes or kept.need_bytes) if here else 0.0)
        if kept.load_s is not None:
            load_s.add_metric(at, kept.load_s)
        for reason in EVICTION_REASONS:
            gone.add_metric((*at, reason), kept.evictions.get(reason, 0))
    return iter((loads, load_s, gone, loaded, memory))
