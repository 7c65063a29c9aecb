"""Memory that mlx and malloc keep of freed arrays."""

from __future__ import annotations

import ctypes
from typing import Final

import mlx.core as mx

MAX_CACHE_BYTES: Final = 1 << 30
"""Freed buffers that mlx keeps for reuse while requests run. mlx's own bound is 32 MiB on Linux and nearly all memory
on a Mac."""
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; Metal's buffers are not of malloc


def bound_memory() -> None:
    """Limit mlx's cache of freed buffers to MAX_CACHE_BYTES."""
    allowed = mx.set_cache_limit(MAX_CACHE_BYTES)
    mx.set_cache_limit(min(allowed, MAX_CACHE_BYTES))


def release_memory() -> None:
    """Return freed buffers to the system; called when no request is left."""
    mx.clear_cache()


def trim_memory() -> None:
    """Return what malloc keeps of freed buffers to the system, which takes about a millisecond.

    On a CPU, mlx's buffers are of malloc, which keeps what is freed below a block in use: up to 40 MB of 330, now more,
    now less, after some hundred short requests.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
