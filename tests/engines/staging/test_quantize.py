"""disagg/engines/staging.py: bit for bit what mx.quantize gives."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
import torch

from disagg.api.layout import BITS, GROUP
from disagg.api.names import AS_IS, INT8, WireForm
from disagg.engines.staging import PIECE, filled_planes

DTYPES = ("float32", "bfloat16", "float16")
Array = np.ndarray
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape)


def one_of(*values: float) -> Callable[..., Array]:
    return lambda *shape: RNG.choice(values, size=shape)


HOSTILE: dict[str, Callable[..., Array]] = {
    "normal": normal,
    "all zeros": lambda *shape: np.zeros(shape),
    "negative zeros": one_of(0.0, -0.0),
    "one constant": lambda *shape: np.full(shape, -3.3),
    "one constant per row": lambda *shape: np.broadcast_to(normal(*shape[:-1], 1), shape),
    "all positive": lambda *shape: np.abs(normal(*shape)) + 5,
    "all negative": lambda *shape: -np.abs(normal(*shape)) - 5,
    "opposite extremes of one size": one_of(-7.5, 0.1, 7.5),
    "halves between two steps": lambda *shape: np.round(normal(*shape) * 4) / 8,
    "outlier channels": lambda *shape: normal(*shape) * np.where(np.arange(shape[-1]) % 17 == 0, 1000, 1),
    "one large element": lambda *shape: np.where(RNG.random(shape) < 0.01, 6e4, 1e-3 * normal(*shape)),
    "every magnitude": lambda *shape: normal(*shape) * 10.0 ** RNG.integers(-8, 4, size=(*shape[:-1], 1)),
    "as narrow as the smallest scale": lambda *shape: 1 + 1e-6 * normal(*shape),
    "subnormal": lambda *shape: normal(*shape) * 1e-40,
    "subnormal in half precision": lambda *shape: normal(*shape) * 3e-7,
    "largest in half precision": one_of(-65504.0, 0.0, 1.0, 65504.0),
}


def as_mlx(rows: torch.Tensor) -> mx.array:
    return mx.array(rows.contiguous())


def bytes_of(array: mx.array) -> bytes:
    return np.asarray(array.view(mx.uint8)).tobytes()


def same_as_mlx(rows: torch.Tensor) -> bool:
    planes = filled_planes(rows, INT8)
    expected = mx.quantize(as_mlx(rows), group_size=GROUP, bits=BITS)
    return [plane.view(torch.uint8).numpy().tobytes() for plane in planes] == [bytes_of(array) for array in expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_every_bit_is_that_of_mx_quantize(kind: str, dtype: str) -> None:
    for dim in (64, 128, 192, 512):
        assert same_as_mlx(torch.tensor(HOSTILE[kind](2, 33, dim)).to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_one_piece_and_strided_heads_are_all_quantised(dtype: str) -> None:
    cache = torch.tensor(normal(3, PIECE + 40, 128)).to(getattr(torch, dtype))
    assert same_as_mlx(cache[:, 7:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_random_tensors_agree(dtype: str) -> None:
    for _ in range(1000 // 8):
        rows = normal(8, 4, 64) * 10.0 ** RNG.uniform(-6, 4, size=(8, 4, 1)) + 10.0 ** RNG.uniform(
            -6, 4, size=(8, 4, 1)
        )
        assert same_as_mlx(torch.tensor(rows).clamp(-6e4, 6e4).to(getattr(torch, dtype)))


def test_what_is_not_quantised_is_the_rows_themselves() -> None:
    rows = torch.randn(2, 5, 40)
    cases: list[tuple[WireForm, torch.Tensor]] = [(INT8, rows), (AS_IS, torch.randn(2, 5, 64))]
    for wire, tensor in cases:
        (plane,) = filled_planes(tensor, wire)
        assert plane.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restored_element_is_at_most_one_step_off(dtype: str) -> None:
    rows = torch.tensor(normal(1, 50, 64)).to(getattr(torch, dtype))
    packed, scales, biases = (plane.float() for plane in filled_planes(rows, INT8))
    rounding = torch.finfo(rows.dtype).eps * (255 * scales.abs() + biases.abs())  # of scale and bias to this dtype
    # Half a step, and half a step more at the end of the group that the scale, fitted to zero, may not reach.
    assert ((packed * scales + biases - rows.float()).abs() <= scales.abs() + rounding).all()
