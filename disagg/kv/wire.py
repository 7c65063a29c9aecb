"""In what form keys and values cross the wire: as they are, or quantised to eight bits.

``int8-g64``: each run of 64 elements of a row becomes 64 bytes, a scale and a bias, as mlx's affine quantisation at
8 bits and group size 64 makes them. A tensor then travels as three *planes*: packed, scales, biases. Tensors whose rows
do not divide into groups, and the tensors of ``state`` layers, travel as they are in either form.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

WireForm = Literal["as-is", "int8-g64"]

WIRE_FORMS: Final[tuple[WireForm, ...]] = get_args(WireForm)
AS_IS: Final = "as-is"
INT8: Final = "int8-g64"
GROUP: Final = 64
BITS: Final = 8


def is_quantised(dim: int, wire: WireForm) -> bool:
    """Whether keys or values with rows of `dim` elements are quantised in this form."""
    return wire == INT8 and dim > 0 and dim % GROUP == 0


def plane_bytes(dim: int, itemsize: int, wire: WireForm) -> tuple[int, ...]:
    """Of each plane of a tensor with rows of `dim` elements of `itemsize` bytes: the bytes of one row of one head."""
    if is_quantised(dim, wire):
        per_group = dim // GROUP * itemsize
        return dim * BITS // 8, per_group, per_group
    return (dim * itemsize,)
