"""Parts of a transfer: the layers and KV heads that one connection carries. Together they are the layout, exactly once.

A tensor-parallel prefill engine opens one connection per rank, each with its heads; a pipeline one per stage, each with
its layers. A prefill engine that has everything opens one connection for the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagg.api.layout import MAX_LAYERS, Layout
from disagg.errors import ProtocolError, clipped

MAX_PARTS = 64
MAX_HEADS = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """layers: indices in ascending order, None for all. heads: the KV heads of each of these layers, [first, end), None
    for all; a layer with fewer heads has none beyond its last. states: whether the states of these layers come on this
    connection too, each whole. hidden: whether the hidden states do, if any are sent."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, int] | None = None
    states: bool = True
    hidden: bool = True

    def heads_of(self, layout: Layout, layer: int) -> range:
        """The KV heads of one layer that this part carries."""
        if not self._has(layer):
            return range(0)
        count = layout.layers[layer].kv_heads
        first, end = self.heads or (0, count)
        return range(min(first, count), min(end, count))

    def has_states(self, layout: Layout, layer: int) -> bool:
        """Whether this part carries the states of one layer."""
        return self.states and bool(layout.layers[layer].states) and self._has(layer)

    def _has(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def to_json(self) -> dict[str, Any]:
        body = {"layers": self.layers, "heads": self.heads, "states": self.states}
        return body if self.hidden else {**body, "hidden": False}

    @staticmethod
    def from_json(body: Any) -> Part:
        """The part that a peer stated. ProtocolError if it is malformed or out of bounds."""
        try:
            part = Part(_layers(body["layers"]), _heads(body["heads"]), body["states"], body.get("hidden", True))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"malformed part in the transfer header: {clipped(repr(error))}") from error
        if type(part.states) is not bool or type(part.hidden) is not bool:
            raise ProtocolError("malformed part in the transfer header: states or hidden is neither true nor false")
        return part


WHOLE = Part()


class Coverage:
    """Which KV heads and states of a layout the parts added so far carry. hidden: whether hidden states are sent, too,
    which come in one part."""

    def __init__(self, layout: Layout, *, hidden: bool = False) -> None:
        self._layout = layout
        self._no_hidden = hidden  # so far
        self._hidden = hidden
        self._heads = [0] * len(layout.layers)  # per layer a bit for each KV head
        self._states = [False] * len(layout.layers)

    def add(self, part: Part) -> None:
        """ProtocolError if the part carries something that an earlier one carries, or a layer that does not exist."""
        if part.layers and part.layers[-1] >= len(self._layout.layers):
            raise ProtocolError(f"a part carries layer {part.layers[-1]} of a model with {len(self._heads)} layers")
        for layer in range(len(self._heads)):
            heads, states = part.heads_of(self._layout, layer), part.has_states(self._layout, layer)
            bits = (1 << heads.stop) - (1 << heads.start)
            if self._heads[layer] & bits:
                which = f"KV heads [{heads.start}, {heads.stop}) of layer {layer}"
                raise ProtocolError(f"two parts carry {which}, or some of them")
            if self._states[layer] and states:
                raise ProtocolError(f"two parts carry the states of layer {layer}")
            self._heads[layer] |= bits
            self._states[layer] |= states
        if self._hidden and part.hidden:
            if not self._no_hidden:
                raise ProtocolError("two parts carry the hidden states")
            self._no_hidden = False

    def require_complete(self) -> None:
        """ProtocolError that names the first layer of which something is in no part."""
        for index, layer in enumerate(self._layout.layers):
            missing = [head for head in range(layer.kv_heads) if not self._heads[index] >> head & 1]
            if missing:
                raise ProtocolError(f"no part carries KV head {missing[0]} of layer {index}")
            if layer.states and not self._states[index]:
                raise ProtocolError(f"no part carries the states of layer {index}")
        if self._no_hidden:
            raise ProtocolError("no part carries the hidden states")


def _layers(body: Any) -> tuple[int, ...] | None:
    if body is None:
        return None
    layers = tuple(body[: MAX_LAYERS + 1])
    if any(type(layer) is not int or not 0 <= layer < MAX_LAYERS for layer in layers):
        raise ValueError("a layer that is not a number within the bound")
    if list(layers) != sorted(set(layers)):
        raise ValueError("layers that are not in ascending order")
    return layers


def _heads(body: Any) -> tuple[int, int] | None:
    if body is None:
        return None
    first, end = body
    if type(first) is not int or type(end) is not int or not 0 <= first < end <= MAX_HEADS:
        raise ValueError("heads that are not a range within the bound")
    return first, end
