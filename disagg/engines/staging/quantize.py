"""Quantise keys and values to eight bits, bit for bit as mlx's affine quantisation with 8 bits and groups of 64.

A group of 64 elements becomes a byte each, a scale and a bias: element = byte * scale + bias. The extreme of the group
that is farther from zero is exact, and zero is as close as a byte allows. Computed in float32, as in mlx's CPU backend;
scales and biases are then rounded to the tensor's dtype.
"""

from __future__ import annotations

import torch

from disagg.api.layout import GROUP, is_quantised
from disagg.api.names import WireForm

LEVELS = 255
SMALLEST_SCALE = 1e-7
# Groups at a time on a CPU: temporaries stay in its cache, and torch does not distribute the work over threads.
PIECE = 32768 // GROUP

Planes = tuple[torch.Tensor, ...]


def empty_planes(rows: torch.Tensor) -> Planes:
    """Memory for the planes of [heads, rows, dim], on the same device: packed bytes, scales, biases."""
    heads, count, dim = rows.shape
    packed = torch.empty(heads, count, dim, dtype=torch.uint8, device=rows.device)
    return packed, *(torch.empty(heads, count, dim // GROUP, dtype=rows.dtype, device=rows.device) for _ in range(2))


def filled_planes(rows: torch.Tensor, wire: WireForm) -> Planes:
    """The planes of [heads, rows, dim], on the same device; one contiguous plane if the rows are sent as-is."""
    if not is_quantised(rows.shape[-1], wire):
        return (rows.contiguous(),)
    planes = empty_planes(rows)
    fill_planes(rows, planes)
    return planes


def fill_planes(rows: torch.Tensor, planes: Planes) -> None:
    """Write [heads, rows, dim] into memory from `empty_planes`."""
    with torch.inference_mode():
        if rows.device.type == "cpu":
            for head, target in enumerate(zip(*planes, strict=True)):
                _fill_by_pieces(rows[head], target)
        else:
            for plane, part in zip(planes, _quantised(rows.reshape(-1, GROUP)), strict=True):
                plane.view(part.shape).copy_(part)


def _fill_by_pieces(rows: torch.Tensor, planes: Planes) -> None:
    """One head, [rows, dim]."""
    groups = rows.reshape(-1, GROUP)
    packed, scales, biases = planes[0].view(-1, GROUP), planes[1].view(-1, 1), planes[2].view(-1, 1)
    for first in range(0, len(groups), PIECE):
        piece = slice(first, first + PIECE)
        for plane, part in zip((packed, scales, biases), _quantised(groups[piece]), strict=True):
            plane[piece].copy_(part)


def _quantised(groups: torch.Tensor) -> Planes:
    """[n, GROUP] -> float32 levels [n, GROUP], scales [n, 1], biases [n, 1]."""
    groups = groups.float()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)  # aminmax takes five times as long
    low_is_far = low.abs() > high.abs()
    scale = ((high - low) / LEVELS).clamp_(min=SMALLEST_SCALE)
    scale = torch.where(low_is_far, scale, -scale)
    edge = torch.where(low_is_far, low, high)
    steps = torch.round(edge / scale)
    reaches_zero = steps != 0
    scale = torch.where(reaches_zero, edge / steps, scale)
    bias = torch.where(reaches_zero, edge, 0.0)
    return torch.sub(groups, bias).div_(scale).round_().clamp_(0, LEVELS), scale, bias
