"""Sending KV while prefill runs: a queue of blocks in front of one link, block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from disagg.planning.prefill import Prefill
from disagg.planning.shapes import ITEMSIZE, ModelShape

Wire = Literal["plain", "int8"]

# Payload of a full TCP segment over the bytes that a 1500-byte Ethernet frame takes on the wire, gaps included.
PAYLOAD_SHARE = 1448 / 1538
# int8 in groups of 64, each with a 16-bit scale and bias: (64 x 8 + 32) / (64 x 16) of a 16-bit cache.
INT8_BITS = 8.5


@dataclass(frozen=True, slots=True)
class Link:
    """A path from prefill to decode host. gbit_s: as printed on the port. latency_s: one way."""

    gbit_s: float
    latency_s: float = 50e-6

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes per second."""
        return self.gbit_s * 1e9 / 8 * PAYLOAD_SHARE


@dataclass(frozen=True, slots=True)
class Shipment:
    """A transfer beside a prefill. busy_s: time the link carried payload; hidden_s: the part of it before prefill
    ended; exposed_s: from the end of prefill until the receiver's acknowledgement is here."""

    nbytes: float
    busy_s: float
    hidden_s: float
    exposed_s: float


def ship(prefill: Prefill, shape: ModelShape, dtype: str, link: Link, wire: Wire = "plain") -> Shipment:
    """Send every layer's rows as soon as they exist, in order, over `link`."""
    row = shape.row_bytes(dtype) * (INT8_BITS / (8 * ITEMSIZE[dtype]) if wire == "int8" else 1.0)
    return carry([(e.at, (e.end - e.start) * row) for e in prefill.emissions], prefill.seconds, link)


def carry(blocks: Iterable[tuple[float, float]], compute_s: float, link: Link) -> Shipment:
    """The transfer of (ready at, bytes) blocks: each leaves when it is ready and the one before it has left."""
    free = hidden = busy = total = 0.0
    for ready, nbytes in blocks:
        begin = max(free, ready)
        free = begin + nbytes / link.bytes_per_s
        hidden += max(0.0, min(free, compute_s) - begin)
        busy += free - begin
        total += nbytes
    exposed = max(0.0, free - compute_s) + 2 * link.latency_s if total else 0.0
    return Shipment(total, busy, hidden, exposed)
