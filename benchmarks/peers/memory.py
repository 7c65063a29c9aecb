"""The bytes that every transport moves: a KV cache's tensors in ordinary host memory, all pages touched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

# Qwen3-Coder-30B-A3B: 48 layers of keys and values, 4 KV heads of 128 dimensions in bfloat16, 8192 tokens: 805 MB.
LAYERS = 48
TENSORS = 2 * LAYERS
KV_HEADS = 4
HEAD_DIM = 128
TOKEN_BYTES = KV_HEADS * HEAD_DIM * 2  # of one tensor
BLOCK_TOKENS = 2048
DEFAULT_MB = 805

Tensor = Any  # numpy.ndarray of uint8, one dimension
_STAMP_BYTES = 8


def tokens_of(megabytes: float) -> int:
    """The number of tokens, in whole blocks, whose KV is closest to this many megabytes (1e6 bytes)."""
    block = BLOCK_TOKENS * TOKEN_BYTES * TENSORS
    return max(1, round(megabytes * 1e6 / block)) * BLOCK_TOKENS


def nbytes_of(tokens: int) -> int:
    """Bytes of the KV of `tokens` tokens."""
    return tokens * TOKEN_BYTES * TENSORS


def source(tokens: int) -> list[Tensor]:
    """Tensors that differ from each other, with incompressible contents."""
    noise = np.random.default_rng(0).integers(0, 256, tokens * TOKEN_BYTES, np.uint8)
    return [noise ^ np.uint8(index) for index in range(TENSORS)]


def destination(tokens: int) -> list[Tensor]:
    """Tensors of the same sizes, written once: a first write to fresh pages costs as much as a transfer."""
    return [np.full(tokens * TOKEN_BYTES, 255, np.uint8) for _ in range(TENSORS)]


def stamp(tensors: Sequence[Tensor], number: int) -> None:
    """Write `number` to both ends of every tensor, so that the bytes of each transfer differ."""
    for tensor in tensors:
        tensor[:_STAMP_BYTES].view(np.uint64)[0] = number
        tensor[-_STAMP_BYTES:].view(np.uint64)[0] = number


def wait_stamped(tensors: Sequence[Tensor], number: int, *, timeout_s: float) -> None:
    """Return once every tensor has both its stamps; TimeoutError if some do not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not all(_stamps(tensor) == (number, number) for tensor in tensors):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the tensors of transfer {number} were not in place after {timeout_s:g} s")
        time.sleep(0.0002)


def digest(tensors: Sequence[Tensor]) -> str:
    """XXH3-128 of all bytes in order, in hex."""
    hashed = xxhash.xxh3_128()
    for tensor in tensors:
        hashed.update(tensor)
    return hashed.hexdigest()


def _stamps(tensor: Tensor) -> tuple[int, int]:
    return int(tensor[:_STAMP_BYTES].view(np.uint64)[0]), int(tensor[-_STAMP_BYTES:].view(np.uint64)[0])
