"""Sending KV during prefill: one link sends a queue of blocks in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disagg.api.names import AS_IS, DTYPE_BYTES, INT8, WireForm
from disagg.planning.prefill import Prefill
from disagg.planning.shapes import ModelShape

# Payload of a full TCP segment / bytes on the wire of a 1500-byte Ethernet frame, preamble and gap included.
PAYLOAD_SHARE = 1448 / 1538
# Per value: int8 in groups of 64, each with a 16-bit scale and bias: (64 x 8 + 32) / 64.
INT8_BITS = 8.5


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
    row = shape.kv.row_bytes(dtype) * (INT8_BITS / (8 * DTYPE_BYTES[dtype]) if wire == INT8 else 1.0)
    rows = [(e.at, (e.end - e.start) * row) for e in prefill.emissions]
    states = [(prefill.seconds, float(shape.kv.states_bytes))] if prefill.tokens and shape.kv.states_bytes else []
    return carry([*rows, *states], prefill.seconds, link)


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
