"""A prompt that both machines compute: how long it takes, layer by layer and chunk by chunk, and what is the ideal.

The prefill host computes layers [0, k) of a chunk, the *head*, while the decode host computes layers [k, L) of the one
before, the *tail*. The tail of a chunk begins once all of its rows and its hidden states have arrived, and the tail of
the chunk before has ended. k = L is the hand-off, k = 0 the decode host alone. Bounds of the queue between the two are
left out: they make the faster end wait, which would wait anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from disagg.api.names import DTYPE_BYTES
from disagg.planning.devices import Device
from disagg.planning.shapes import ModelShape
from disagg.planning.times import Link, layer_times

LayerTimes = Mapping[int | None, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class SplitPair:
    """A model on two machines, `head` in front of `tail`, which compute prompts in chunks of at most `chunk_tokens`."""

    shape: ModelShape
    head: Device
    tail: Device
    link: Link
    dtype: str
    chunk_tokens: int

    def chunks(self, tokens: int) -> Sequence[range]:
        starts = range(0, tokens, self.chunk_tokens)
        return [range(start, min(tokens, start + self.chunk_tokens)) for start in starts]

    def times(self, device: Device, tokens: int) -> Sequence[LayerTimes]:
        """The times of one machine's layers, chunk by chunk."""
        return [layer_times(device, self.shape, self.dtype, chunk) for chunk in self.chunks(tokens)]


@dataclass(frozen=True, slots=True)
class PredictedSplit:
    """A predicted prefill of a prompt. layers: k. seconds: from the head's beginning to the end of the tail, or of the
    transfer. head_s, tail_s: that each machine computes. nbytes: on the wire."""

    layers: int
    seconds: float
    head_s: float
    tail_s: float
    nbytes: float


def split(pair: SplitPair, tokens: int, layers: int) -> PredictedSplit:
    """Predict the prefill of `tokens` tokens of which the head computes `layers` layers."""
    return _split(pair, tokens, layers, pair.times(pair.head, tokens), pair.times(pair.tail, tokens))


def best_split(pair: SplitPair, tokens: int) -> PredictedSplit:
    """The quickest division of the model's layers, hand-off and decode host alone among them."""
    head, tail = pair.times(pair.head, tokens), pair.times(pair.tail, tokens)
    every = (_split(pair, tokens, layers, head, tail) for layers in range(pair.shape.layers + 1))
    return min(every, key=lambda one: one.seconds)


def ideal_s(pair: SplitPair, tokens: int) -> float:
    """The least seconds in which both machines can compute a prompt in these chunks if layers could be divided at any
    point and sending took no time. The tail computes the last chunk after the head's end, and does not begin before the
    head has computed the first one: two bounds, each linear in the head's share of the layers."""
    if not tokens:
        return 0.0
    head, tail = (_computed(pair.shape, pair.times(device, tokens), 0) for device in (pair.head, pair.tail))
    after, before = (tail[-1], sum(head)), (sum(tail), head[0])  # of a share of 0, and of 1

    def bound(share: float) -> float:
        return max(at_0 + share * (at_1 - at_0) for at_0, at_1 in (after, before))

    steeper = after[1] - after[0] - before[1] + before[0]
    crossing = (before[0] - after[0]) / steeper if steeper > 0 else 0.0
    return min(bound(share) for share in (0.0, min(1.0, crossing), 1.0))


def _split(
    pair: SplitPair, tokens: int, layers: int, head: Sequence[LayerTimes], tail: Sequence[LayerTimes]
) -> PredictedSplit:
    tails = _computed(pair.shape, tail, layers)
    if layers == 0:
        return PredictedSplit(layers, sum(tails), 0.0, sum(tails), 0.0)
    heads = list(accumulate(_computed(pair.shape, head, 0, layers)))
    arrivals, nbytes = _arrivals(pair, tokens, layers, head, heads)
    end = 0.0
    for arrived, seconds in zip(arrivals, tails, strict=True):
        end = max(end, arrived) + seconds
    return PredictedSplit(layers, end, heads[-1] if heads else 0.0, sum(tails), nbytes)


def _computed(shape: ModelShape, times: Sequence[LayerTimes], first: int, end: int | None = None) -> list[float]:
    """Seconds that each chunk's layers [first, end) take."""
    windows = shape.windows[first:end]
    return [sum(of_layer[window][1] for window in windows) for of_layer in times]


def _arrivals(
    pair: SplitPair, tokens: int, layers: int, times: Sequence[LayerTimes], ends: Sequence[float]
) -> tuple[list[float], float]:
    """When each chunk has arrived whole, in seconds since the head's beginning, and the bytes of the transfer. The link
    sends blocks in order: of each chunk each layer's rows, the hidden states, and with the last chunk the states."""
    shape, layout, link = pair.shape, pair.shape.layout(pair.dtype), pair.link
    row = [layer.row_bytes(layout.itemsize) for layer in layout.layers[:layers]]
    hidden = shape.hidden * DTYPE_BYTES[pair.dtype] if layers < shape.layers else 0
    states = sum(layer.state_bytes for layer in layout.layers[:layers])
    arrivals: list[float] = []
    free = total = now = 0.0
    for chunk, of_layer, end in zip(pair.chunks(tokens), times, ends, strict=True):
        for window, row_bytes in zip(shape.windows, row, strict=False):
            ready, seconds = of_layer[window]
            nbytes = float(row_bytes * (len(chunk) if window is None else min(len(chunk), window)))
            if nbytes:
                free, total = max(free, now + ready) + nbytes / link.bytes_per_s, total + nbytes
            now += seconds
        nbytes = float(len(chunk) * hidden + (states if chunk.stop == tokens else 0))
        free, total = max(free, end) + nbytes / link.bytes_per_s, total + nbytes
        arrivals.append(free + link.latency_s)
    return arrivals, total
