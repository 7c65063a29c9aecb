"""Where in one arena each tensor of a KV cache lies."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.kv.layout import Layout
from disagg.kv.wire import AS_IS, WireForm, plane_bytes

ALIGNMENT = 256  # of each tensor, in bytes: more than any vector load of a CPU or a GPU asks for


@dataclass(frozen=True, slots=True)
class Placement:
    """Byte ranges of an arena, per layer: of each plane of the keys and of the values, of each state tensor."""

    keys: tuple[tuple[slice, ...], ...]
    values: tuple[tuple[slice, ...], ...]
    states: tuple[tuple[slice, ...], ...]
    nbytes: int  # of the whole arena, gaps included

    @classmethod
    def of(cls, layout: Layout, tokens: int, start: int = 0, wire: WireForm = AS_IS) -> Placement:
        """For the KV of tokens [start, tokens); nothing but empty ranges where there are none."""
        end = 0

        def take(nbytes: int) -> slice:
            nonlocal end
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + nbytes
            return slice(begin, end)

        keys: list[tuple[slice, ...]] = []
        values: list[tuple[slice, ...]] = []
        states: list[tuple[slice, ...]] = []
        for layer in layout.layers:
            rows = layer.kv_heads * len(layer.rows(tokens, start))
            for places, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                places.append(tuple(take(rows * size) for size in plane_bytes(dim, layout.itemsize, wire)))
            shipped = layer.states if tokens > start else ()
            states.append(tuple(take(state.nbytes) for state in shipped))
        return cls(tuple(keys), tuple(values), tuple(states), end)
