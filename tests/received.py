"""A ReceivedKV from tensors that a test made, as if they had come over the wire into the engine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.api.layout import Layout
from disagg.engines.mlx.memory import allocate
from disagg.kv.arena import Arenas
from disagg.kv.received import ByteRanges, ReceivedKV


def received(
    layout: Layout,
    tokens: int,
    keys: Sequence[Any],
    values: Sequence[Any],
    states: Sequence[Sequence[Any]] = (),
    start: int = 0,
) -> ReceivedKV:
    """Flat uint8 arrays per layer, each of the size that the layout asks for. keys, values: as they are."""
    kv = ReceivedKV(layout, tokens, Arenas(allocate).acquire(ByteRanges.of(layout, tokens, start).nbytes), start)
    pairs = [([plane for (plane,) in mine], given) for mine, given in ((kv.keys, keys), (kv.values, values))]
    for mine, given in (*pairs, *zip(kv.states, states, strict=False)):
        for place, tensor in zip(mine, given, strict=True):
            place[:] = tensor
    return kv
