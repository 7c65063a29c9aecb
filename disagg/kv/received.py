"""What a finished transfer leaves behind: a whole KV cache in host memory, and when it came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disagg.kv.layout import Layout

Buffer = Any  # numpy.ndarray of uint8, C-contiguous


@dataclass(frozen=True, slots=True)
class ReceiveTiming:
    """time.monotonic() on the receiving host. With nothing to ship, the byte times are those of the end frame."""

    claimed: float = 0.0  # the ticket was accepted
    first_byte: float = 0.0  # the first frame began to arrive
    last_byte: float = 0.0  # the end frame was read
    accepted: float = 0.0  # coverage and digest were found right; the acknowledgement follows


@dataclass(slots=True, eq=False)
class ReceivedKV:
    """The KV cache of tokens [start, tokens), in host memory.

    keys[l], values[l]: uint8 arrays of kv_heads * rows * dim * itemsize bytes, to be read as
    [kv_heads, len(layout.layers[l].rows(tokens, start)), dim] of `layout.dtype`, C order.
    states[l]: one array per state tensor; none where nothing was shipped (tokens == start).
    release: to be called by the owner once the buffers are no longer needed; their bytes count until then.
    """

    layout: Layout
    tokens: int
    keys: list[Buffer]
    values: list[Buffer]
    states: list[list[Buffer]]
    start: int = 0
    timing: ReceiveTiming = field(default_factory=ReceiveTiming)
    on_release: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes(self.tokens, self.start)

    def release(self) -> None:
        """Drop the buffers and give their bytes back to the receiver's budget. Twice is as good as once."""
        self.keys, self.values, self.states = [], [], []
        if self.on_release is not None:
            self.on_release()
