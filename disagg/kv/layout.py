"""The shape of a model's KV cache, which must be the same on both hosts.

A layer is one of
- ``full``: keys [kv_heads, n, key_dim] and values [kv_heads, n, value_dim] for all n tokens;
- ``sliding``: the same, for the last min(n, window) tokens only, in temporal order;
- ``state``: fixed-size tensors that do not grow with n (linear attention, convolutions).

Batch is always 1 and never appears. Keys are post-RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from disagg.api.names import AS_IS, DTYPE_BYTES, WireForm
from disagg.errors import LayoutMismatch, ProtocolError, clipped
from disagg.kv.forms import plane_bytes

MAX_LAYERS = 1024

LayerKind = Literal["full", "sliding", "state"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One fixed-size tensor of a ``state`` layer."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer. `window` is set for ``sliding`` only. `states`: of a ``state`` layer, or besides rows."""

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    states: tuple[StateTensor, ...] = ()

    def rows(self, tokens: int, start: int = 0) -> range:
        """The absolute token indices from `start` on that this layer keeps after `tokens` tokens."""
        if self.kind == "state":
            return range(0)
        first = max(0, tokens - self.window) if self.window else 0
        return range(max(first, start), tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    """All layers of one model and the dtype of their keys and values."""

    layers: tuple[LayerLayout, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def nbytes(self, tokens: int, start: int = 0, wire: WireForm = AS_IS) -> int:
        """Payload bytes of a transfer of tokens [start, tokens); 0 if there are none."""
        if tokens <= start:
            return 0
        return sum(
            layer.kv_heads * self._row_bytes(layer, wire) * len(layer.rows(tokens, start))
            + sum(state.nbytes for state in layer.states)
            for layer in self.layers
        )

    def require_same(self, other: Layout, *, mine: str, theirs: str) -> None:
        """Raise LayoutMismatch naming the first field that differs; `mine`/`theirs` name the two hosts' roles."""
        for field, here, there in _differences(self, other):
            raise LayoutMismatch(
                f"KV layouts differ in {field}: {mine} has {clipped(here)}, {theirs} has {clipped(there)}",
                "serve the same model and the same KV dtype on both hosts",
            )

    def _row_bytes(self, layer: LayerLayout, wire: WireForm) -> int:
        return sum(sum(plane_bytes(dim, self.itemsize, wire)) for dim in (layer.key_dim, layer.value_dim))

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "layers": [asdict(layer) for layer in self.layers]}

    @staticmethod
    def from_json(body: Any) -> Layout:
        """The layout that a peer sent. ProtocolError if it is malformed or out of bounds."""
        try:
            layers = tuple(_layer_from_json(layer) for layer in body["layers"][: MAX_LAYERS + 1])
            layout = Layout(layers, str(body["dtype"]))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ProtocolError(f"malformed layout in the transfer header: {clipped(repr(error))}") from error
        if layout.dtype not in DTYPE_BYTES or not 1 <= len(layout.layers) <= MAX_LAYERS:
            raise ProtocolError(f"unusable layout: dtype {clipped(repr(layout.dtype))}, {len(layout.layers)} layers")
        return layout


def _layer_from_json(body: dict[str, Any]) -> LayerLayout:
    states = tuple(StateTensor(tuple(int(n) for n in s["shape"]), str(s["dtype"])) for s in body["states"])
    kind = body["kind"]
    if kind not in ("full", "sliding", "state"):
        raise ValueError(f"layer kind {clipped(repr(kind))}")
    window = None if body["window"] is None else int(body["window"])
    return LayerLayout(kind, int(body["kv_heads"]), int(body["key_dim"]), int(body["value_dim"]), window, states)


def _differences(here: Layout, there: Layout) -> Iterator[tuple[str, object, object]]:
    if here.dtype != there.dtype:
        yield "dtype", here.dtype, there.dtype
    if len(here.layers) != len(there.layers):
        yield "number of layers", len(here.layers), len(there.layers)
    for index, (a, b) in enumerate(zip(here.layers, there.layers, strict=False)):
        for field in fields(LayerLayout):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if x != y:
                yield f"layers[{index}].{field.name}", x, y
