"""Where in one arena each tensor of a KV cache lies."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.kv.layout import Layout

ALIGNMENT = 256  # of each tensor, in bytes: more than any vector load of a CPU or a GPU asks for


@dataclass(frozen=True, slots=True)
class Placement:
    """Byte ranges of an arena, per layer: of the keys, of the values, of each state tensor."""

    keys: tuple[slice, ...]
    values: tuple[slice, ...]
    states: tuple[tuple[slice, ...], ...]
    nbytes: int  # of the whole arena, gaps included

    @classmethod
    def of(cls, layout: Layout, tokens: int, start: int = 0) -> Placement:
        """For the KV of tokens [start, tokens); nothing but empty ranges where there are none."""
        end = 0

        def take(nbytes: int) -> slice:
            nonlocal end
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + nbytes
            return slice(begin, end)

        keys, values, states = [], [], []
        for layer in layout.layers:
            row_bytes = layer.kv_heads * len(layer.rows(tokens, start)) * layout.itemsize
            keys.append(take(row_bytes * layer.key_dim))
            values.append(take(row_bytes * layer.value_dim))
            shipped = layer.states if tokens > start else ()
            states.append(tuple(take(state.nbytes) for state in shipped))
        return cls(tuple(keys), tuple(values), tuple(states), end)
