"""How long a request takes on given machines: reading the prompt, sending its KV, and writing the answer.

Prefill, layer by layer and chunk by chunk, is bound by arithmetic or by reading weights:

    layer time = max(FLOPs / reached FLOP/s, weight bytes / reached bytes/s) + overhead

FLOPs are 2 per parameter and token, plus 4 x heads x head_dim per pair of tokens in attention. The output head is
left out: prefill needs no logits. A layer's KV exists after its query, key and value projections, before its attention.

A link sends a queue of blocks in order. Every step of an answer reads the weights that its tokens use, and the KV of
every sequence:

    step time = max(bytes / reached bytes/s, FLOPs / reached FLOP/s) + overhead
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from disagg.api.names import AS_IS, WireForm
from disagg.planning.devices import Device
from disagg.planning.shapes import ModelShape

# Payload of a full TCP segment / bytes on the wire of a 1500-byte Ethernet frame, preamble and gap included.
PAYLOAD_SHARE = 1448 / 1538
# mx.array over a received numpy buffer, measured on a 2-core x86 machine; a Mac should not be slower.
INGEST_BYTES_PER_S = 28.8e9


@dataclass(frozen=True, slots=True)
class Emission:
    """Rows [start, end) of one layer's KV, which exist `at` seconds after prefill began."""

    layer: int
    start: int
    end: int
    at: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """A predicted prefill. emissions: in order of time. chunk_ends: seconds since the start."""

    tokens: int
    emissions: tuple[Emission, ...]
    chunk_ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.chunk_ends[-1] if self.chunk_ends else 0.0


def prefill(device: Device, shape: ModelShape, tokens: int, dtype: str, chunk_tokens: int) -> Prefill:
    """Predict the prefill of `tokens` tokens in chunks of at most `chunk_tokens`."""
    now = 0.0
    emissions: list[Emission] = []
    chunk_ends: list[float] = []
    for start in range(0, tokens, chunk_tokens):
        one = piece(device, shape, tokens, dtype, range(start, min(tokens, start + chunk_tokens)))
        emissions.extend(replace(emission, at=now + emission.at) for emission in one.emissions)
        now += one.seconds
        chunk_ends.append(now)
    return Prefill(tokens, tuple(emissions), tuple(chunk_ends))


def piece(
    device: Device, shape: ModelShape, tokens: int, dtype: str, chunk: range, *, layers: range | None = None
) -> Prefill:
    """Predict one chunk of a prompt of `tokens` tokens, from its own start on. layers: that are computed; None: all."""
    now, layout = 0.0, shape.layout(dtype)
    emissions, of_layer = [], layer_times(device, shape, dtype, chunk)
    for layer in range(shape.layers) if layers is None else layers:
        ready, seconds = of_layer[shape.windows[layer]]
        rows = layout.layers[layer].rows(tokens)
        first = max(chunk.start, rows.start)
        if rows and first < chunk.stop:
            emissions.append(Emission(layer, first, chunk.stop, now + ready))
        now += seconds
    return Prefill(len(chunk), tuple(emissions), (now,))


def layer_times(
    device: Device, shape: ModelShape, dtype: str, chunk: range
) -> Mapping[int | None, tuple[float, float]]:
    """Seconds from the start of a layer to its KV, and to its end, for this chunk of tokens; by the layer's window."""
    new = len(chunk)
    experts = 2 * new * shape.experts_per_token * shape.expert_params / device.expert_flops(dtype)
    weights = shape.dense_params * shape.weight_bits / 8
    weights += shape.distinct_experts(new) * shape.expert_params * shape.expert_bits / 8
    to_kv = 2 * new * shape.qkv_params / device.flops(dtype)
    times = {}
    for window in set(shape.windows):
        pairs = attended(chunk.start, chunk.stop, window)
        dense = 2 * new * shape.dense_params + 4 * shape.heads * shape.head_dim * pairs
        compute = dense / device.flops(dtype) + experts
        seconds = max(compute, weights / device.bytes_per_s) + device.layer_overhead_s
        times[window] = seconds * to_kv / compute, seconds
    return times


def attended(start: int, end: int, window: int | None) -> int:
    """Pairs of tokens in causal attention for the queries [start, end)."""
    if window is None:
        return (end * (end + 1) - start * (start + 1)) // 2
    growing = min(end, window)  # queries before this one attend to every token
    pairs = max(0, growing * (growing + 1) - start * (start + 1)) // 2
    return pairs + (end - max(start, window)) * window if end > window else pairs


@dataclass(frozen=True, slots=True)
class Link:
    """A path from prefill to decode host. gbit_s: nominal. latency_s: one way."""

    gbit_s: float
    latency_s: float = 50e-6

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes per second."""
        return self.gbit_s * 1e9 / 8 * PAYLOAD_SHARE


@dataclass(frozen=True, slots=True)
class PredictedTransfer:
    """A transfer during a prefill. busy_s: time that the link carries payload. hidden_s: the part of it before prefill
    ends. exposed_s: end of prefill -> the receiver's acknowledgement."""

    nbytes: float
    busy_s: float
    hidden_s: float
    exposed_s: float


def ship(prefill: Prefill, shape: ModelShape, dtype: str, link: Link, wire: WireForm = AS_IS) -> PredictedTransfer:
    """Predict sending every layer's rows, in order, each as soon as it exists, and the states at the end."""
    layout = shape.layout(dtype)
    row = [layer.row_bytes(layout.itemsize, wire) for layer in layout.layers]
    rows = [(e.at, float((e.end - e.start) * row[e.layer])) for e in prefill.emissions]
    states = float(sum(layer.state_bytes for layer in layout.layers))
    return carry([*rows, *([(prefill.seconds, states)] if prefill.tokens and states else [])], prefill.seconds, link)


def carry(blocks: Iterable[tuple[float, float]], compute_s: float, link: Link) -> PredictedTransfer:
    """The transfer of (ready at, bytes) blocks. Each is sent when it is ready and the one before it is sent."""
    free = hidden = busy = total = 0.0
    for ready, nbytes in blocks:
        begin = max(free, ready)
        free = begin + nbytes / link.bytes_per_s
        hidden += max(0.0, min(free, compute_s) - begin)
        busy += free - begin
        total += nbytes
    exposed = max(0.0, free - compute_s) + 2 * link.latency_s if total else 0.0
    return PredictedTransfer(total, busy, hidden, exposed)


def ingest(nbytes: float) -> float:
    """Seconds to build a cache from received bytes."""
    return nbytes / INGEST_BYTES_PER_S


def step(device: Device, shape: ModelShape, context: int, dtype: str, batch: int = 1) -> float:
    """Seconds of one decode step of `batch` sequences of `context` tokens each.

    Experts are taken to be chosen at random, an upper bound of what a batch reads. Real routing repeats itself and is
    faster: llama.cpp measures 131 ms, this predicts about 190 (Qwen3-Coder-30B, 16 x 8k, DGX Spark).
    """
    weights = (shape.layers * shape.dense_params * shape.weight_bits + shape.head_params * shape.table_bits) / 8
    experts = shape.layers * shape.distinct_experts(batch) * shape.expert_params * shape.expert_bits / 8
    read = weights + experts + batch * shape.layout(dtype).nbytes(context)
    attended = sum(context if window is None else min(context, window) for window in shape.windows)
    flops = batch * (2 * shape.active_params + 4 * shape.heads * shape.head_dim * attended)
    overhead = shape.layers * (device.layer_overhead_s + (device.expert_overhead_s if shape.experts else 0.0))
    return max(read / device.bytes_per_s, flops / device.flops(dtype)) + overhead


def generation(device: Device, shape: ModelShape, prompt: int, tokens: int, *, dtype: str, batch: int = 1) -> float:
    """Seconds of `tokens` steps after a prompt of `prompt` tokens.

    Step times grow linearly except while a window fills, so that a few of them give the mean.
    """
    if tokens <= 0:
        return 0.0
    probes = sorted({prompt, prompt + (tokens - 1) // 4, prompt + (tokens - 1) // 2, prompt + tokens - 1})
    times = [step(device, shape, context, dtype, batch) for context in probes]
    spans = zip(probes, probes[1:], times, times[1:], strict=False)
    area = sum((b - a) * (before + after) / 2 for a, b, before, after in spans)
    return tokens * (area / (probes[-1] - probes[0]) if len(probes) > 1 else times[0])
