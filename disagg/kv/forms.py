"""The wire forms of keys and values: ``as-is`` (unchanged), or ``int8-g64`` (quantised to eight bits).

``int8-g64``: each group of 64 elements of a row becomes 64 bytes, a scale and a bias, as in mlx's affine quantisation
with 8 bits and group size 64. A tensor is then sent as three *planes*: packed, scales, biases. Tensors whose rows do
not divide into groups, and the tensors of ``state`` layers, are always sent as-is.
"""

from __future__ import annotations

from typing import Final

from disagg.api.names import INT8, WireForm

GROUP: Final = 64
BITS: Final = 8


def is_quantised(dim: int, wire: WireForm) -> bool:
    """Whether keys or values with rows of `dim` elements are quantised in this form."""
    return wire == INT8 and dim > 0 and dim % GROUP == 0


def plane_bytes(dim: int, itemsize: int, wire: WireForm) -> tuple[int, ...]:
    """Bytes per row of one head, for each plane of a tensor with rows of `dim` elements of `itemsize` bytes."""
    if is_quantised(dim, wire):
        per_group = dim // GROUP * itemsize
        return dim * BITS // 8, per_group, per_group
    return (dim * itemsize,)
