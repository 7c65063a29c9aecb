"""The memory of mlx arrays: what KV is received into, and what mlx and malloc keep of freed ones."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import mlx.core as mx

from disagg.kv.received import ALIGNMENT

MAX_CACHE_BYTES: Final = 1 << 30
"""Freed buffers that mlx keeps for reuse while requests run. mlx's own bound is 32 MiB on Linux and nearly all memory
on a Mac."""
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; Metal's buffers are not of malloc
# mlx starts an operating system thread for every stream and never ends it: 100 allocations on 100 streams left 100
# threads behind. These threads keep their streams. Several, because fresh memory takes a page fault per page: 0.3 s for
# 800 MB.
_ALLOCATORS: Final = ThreadPoolExecutor(4, thread_name_prefix="kv-memory")


def allocate(nbytes: int) -> Any:
    """An mlx array of at least `nbytes` bytes to receive KV into. Callable from any thread; MemoryError if there is not
    enough memory.

    Its rows have ALIGNMENT bytes, since no dimension of an mlx array may exceed 2**31.
    """
    return _ALLOCATORS.submit(_allocate_here, nbytes).result()


def _allocate_here(nbytes: int) -> Any:
    """Uses the CPU's stream even if the model runs on a GPU: memory is shared, and no kernel is needed."""
    with mx.stream(mx.cpu):
        try:
            memory = mx.empty((-(-nbytes // ALIGNMENT), ALIGNMENT), dtype=mx.uint8)
            mx.eval(memory)
        except (RuntimeError, OverflowError) as error:  # malloc failed, or larger than an array can be
            raise MemoryError(str(error)) from error
    return memory


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
