"""Reading a prompt, layer by layer and chunk by chunk, each bound by arithmetic or by reading its weights.

    layer time = max(FLOPs / reached FLOP/s, weight bytes / reached bytes/s) + overhead

FLOPs are 2 per parameter and token, plus 4 x heads x head_dim per pair of tokens in attention. The output head is
left out: prefill needs no logits. A layer's KV exists after its query, key and value projections, before its attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg.planning.devices import Device
from disagg.planning.shapes import ModelShape


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


def piece(device: Device, shape: ModelShape, tokens: int, dtype: str, chunk: range) -> Prefill:
    """Predict one chunk of a prompt of `tokens` tokens, from its own start on."""
    now, kv = 0.0, shape.kv
    emissions = []
    for layer in range(shape.layers):
        ready, seconds = _layer(device, shape, dtype, layer, chunk)
        first = max(chunk.start, tokens - kv.rows(layer, tokens))
        if first < chunk.stop:
            emissions.append(Emission(layer, first, chunk.stop, now + ready))
        now += seconds
    return Prefill(len(chunk), tuple(emissions), (now,))


def _layer(device: Device, shape: ModelShape, dtype: str, layer: int, chunk: range) -> tuple[float, float]:
    """Seconds from the start of the layer to its KV, and to its end, for this chunk of tokens."""
    new = len(chunk)
    pairs = attended(chunk.start, chunk.stop, shape.windows[layer])
    dense = 2 * new * shape.dense_params + 4 * shape.heads * shape.head_dim * pairs
    experts = 2 * new * shape.experts_per_token * shape.expert_params
    compute = dense / device.flops(dtype) + experts / device.expert_flops(dtype)
    weights = shape.dense_params * shape.weight_bits / 8
    weights += shape.distinct_experts(new) * shape.expert_params * shape.expert_bits / 8
    seconds = max(compute, weights / device.bytes_per_s) + device.layer_overhead_s
    return seconds * (2 * new * shape.qkv_params / device.flops(dtype)) / compute, seconds


def attended(start: int, end: int, window: int | None) -> int:
    """Pairs of tokens in causal attention for the queries [start, end)."""
    if window is None:
        return (end * (end + 1) - start * (start + 1)) // 2
    growing = min(end, window)  # queries before this one attend to every token
    pairs = max(0, growing * (growing + 1) - start * (start + 1)) // 2
    return pairs + (end - max(start, window)) * window if end > window else pairs
