"""What the KV of a model is, layer by layer, which must be the same on both hosts; and how many bytes it has.

A layer is one of
- ``full``: keys [kv_heads, n, key_dim] and values [kv_heads, n, value_dim] for all n tokens;
- ``sliding``: the same, for the last min(n, window) tokens only, in temporal order;
- ``index``: keys [1, n, key_dim] by which the layer before it chooses the tokens that it attends to (sparse attention):
  a layer of the model with a second cache is two layers here;
- ``state``: fixed-size tensors that do not grow with n (linear attention, convolutions).

Batch is always 1 and never appears. Keys are post-RoPE.

Keys and values cross the network ``as-is``, or in the wire form ``int8-g64``: each group of 64 elements of a row
becomes 64 bytes, a scale and a bias, as in mlx's affine quantisation with 8 bits and group size 64. A tensor is then
sent as three *planes*: packed, scales, biases. Tensors whose rows do not divide into groups, and those of ``state``
layers, are always sent as-is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, get_args

from disagg.api.names import AS_IS, DTYPE_BYTES, INT8, WireForm
from disagg.errors import LayoutMismatch, ProtocolError, clipped

MAX_LAYERS: Final = 1024
GROUP: Final = 64
BITS: Final = 8

SPLIT_CHUNKS: Final = (512, 1024)
"""Lengths of chunks that are good for splits: the two hosts wait for each other for one chunk, and one that is shorter
takes as long as reading the weights."""
_LONG_TOKENS: Final = 8192

LayerKind = Literal["full", "sliding", "index", "state"]


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

    def row_bytes(self, itemsize: int, wire: WireForm = AS_IS) -> int:
        """Bytes of one token's keys and values."""
        return self.kv_heads * sum(sum(plane_bytes(dim, itemsize, wire)) for dim in (self.key_dim, self.value_dim))

    @property
    def keeps_every_row(self) -> bool:
        """Whether it keeps rows of all tokens and nothing else, and so can be cut at any token."""
        return self.kind in ("full", "index") and not self.states

    @property
    def state_bytes(self) -> int:
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True)
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
            count * (layer.row_bytes(self.itemsize, wire) * len(layer.rows(tokens, start)) + layer.state_bytes)
            for layer, count in self._alike
        )

    @cached_property
    def _alike(self) -> Sequence[tuple[LayerLayout, int]]:
        """The different layers, and how often each is there: most models have one or two."""
        return tuple(Counter(self.layers).items())

    def require_same(self, other: Layout, *, mine: str, theirs: str) -> None:
        """Raise LayoutMismatch naming the first field that differs; `mine`/`theirs` name the two hosts' roles."""
        for field, here, there in _differences(self, other):
            raise LayoutMismatch(
                f"KV layouts differ in {field}: {mine} has {clipped(here)}, {theirs} has {clipped(there)}",
                "serve the same model and the same KV dtype on both hosts",
            )

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


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """How the layers of a model can be divided between two hosts: one computes the first k of them for each token, its
    *head*, the other the rest, its *tail*, from the hidden states that the head ends with.

    layers: of the model, also those that keep nothing. places: to which of them each layer of the layout belongs,
    ascending; two to one that has an index. hidden: elements of one token's hidden state, in the layout's dtype.
    refusal: why 0 < k < layers is refused; empty if it is not.
    """

    layers: int
    places: tuple[int, ...]
    hidden: int
    refusal: str = ""

    def head(self, layout: Layout, k: int) -> Layout:
        """The layout of the KV that the model's first k layers keep; `layout` itself if these are all."""
        return layout if k >= self.layers else Layout(layout.layers[: self.count(k)], layout.dtype)

    def count(self, k: int) -> int:
        """How many layers of the layout are among the model's first k."""
        return bisect_left(self.places, k)


def split_chunk(tokens: int) -> int:
    """The most tokens of a chunk of a prompt of `tokens` tokens whose layers two hosts compute."""
    return SPLIT_CHUNKS[tokens > _LONG_TOKENS]


@lru_cache(maxsize=64)
def uniform(
    windows: tuple[int | None, ...],
    kv_heads: int,
    head_dim: int,
    dtype: str,
    *,
    states: tuple[StateTensor, ...] = (),
    value_dim: int | None = None,
) -> Layout:
    """The layout of a model whose layers differ only in what they see. windows: per layer, tokens that attention sees;
    None for all, 0 for a layer with `states` instead of attention. value_dim: head_dim, unless it is another."""
    values = head_dim if value_dim is None else value_dim
    kinds = {
        window: LayerLayout("state", states=states)
        if window == 0
        else LayerLayout("sliding" if window else "full", kv_heads, head_dim, values, window)
        for window in set(windows)
    }
    return Layout(tuple(kinds[window] for window in windows), dtype)


def is_quantised(dim: int, wire: WireForm) -> bool:
    """Whether keys or values with rows of `dim` elements are quantised in this form."""
    return wire == INT8 and dim > 0 and dim % GROUP == 0


def plane_bytes(dim: int, itemsize: int, wire: WireForm) -> tuple[int, ...]:
    """Bytes per row of one head, for each plane of a tensor with rows of `dim` elements of `itemsize` bytes."""
    if is_quantised(dim, wire):
        per_group = dim // GROUP * itemsize
        return dim * BITS // 8, per_group, per_group
    return (dim * itemsize,)


def _layer_from_json(body: dict[str, Any]) -> LayerLayout:
    states = tuple(StateTensor(tuple(int(n) for n in s["shape"]), str(s["dtype"])) for s in body["states"])
    kind = body["kind"]
    if kind not in get_args(LayerKind):
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
