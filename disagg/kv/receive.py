"""The receiving end of a transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagg.kv.layout import Layout

Buffer = Any  # numpy.ndarray of uint8, C-contiguous


@dataclass(slots=True)
class ReceivedKV:
    """A whole KV cache for `tokens` tokens, in host memory.

    keys[l], values[l]: uint8 arrays of kv_heads * rows * dim * itemsize bytes, to be read as
    [kv_heads, len(layout.layers[l].rows(tokens)), dim] of `layout.dtype`, C order.
    states[l]: one array per state tensor.
    """

    layout: Layout
    tokens: int
    keys: list[Buffer]
    values: list[Buffer]
    states: list[list[Buffer]]

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes(self.tokens)
