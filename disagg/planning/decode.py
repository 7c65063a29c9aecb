"""Generating an answer: every step reads the weights that its tokens use, and the KV of every sequence.

step time = max(bytes / reached bytes/s, FLOPs / reached FLOP/s) + overhead
"""

from __future__ import annotations

from disagg.planning.devices import Device
from disagg.planning.shapes import ModelShape

# mx.array over a received numpy buffer, measured on a 2-core x86 machine; a Mac should not be slower.
INGEST_BYTES_PER_S = 28.8e9


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
    read = weights + experts + batch * shape.kv.nbytes(context, dtype)
    attended = sum(shape.kv.rows(layer, context) for layer in range(shape.layers))
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
