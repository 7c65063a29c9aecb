"""Rows of keys and values in vLLM's page tensors.

vLLM shows every layer's pages as [blocks, heads, rows of a block, key_dim + value_dim]. The attention backends of GPUs
have in each row its key, then its value. That of CPUs has, per block and head, all keys as [key_dim, rows], then all
values as [rows, value_dim]. Which of the two a tensor has is not guessed: `detect` writes rows with vLLM's own
operation and takes the form that reads them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from disagg.engines.vllm.rows import places
from disagg.errors import ModelError
from disagg.kv.layout import LayerLayout

# (pages, blocks [T], offsets [T]) -> keys and values, [1, heads, T, dim] each, in memory of their own
Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Write keys and values [T, heads, dim] at these slots (block * block size + offset), with vLLM's own operation.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def read_rows(pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row holds its key, then its value, of the same width."""
    dim = pages.shape[3] // 2
    rows = pages[blocks, :, offsets]
    return rows[None, :, :, :dim].transpose(1, 2).contiguous(), rows[None, :, :, dim:].transpose(1, 2).contiguous()


def read_columns(pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys of a block come first, transposed; then all values."""
    count, heads, size, width = pages.shape
    dim = width // 2
    halves = pages.view(count, heads, size * 2, dim)
    keys = halves[:, :, :size].view(count, heads, dim, size).transpose(2, 3)[blocks, :, offsets]
    values = halves[:, :, size:][blocks, :, offsets]
    return keys[None].transpose(1, 2).contiguous(), values[None].transpose(1, 2).contiguous()


class Places:
    """Blocks and offsets of rows, on a device. Layers of a group that keep the same rows of a prompt share them: one
    copy per step, for which the computing stream does not wait."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int], range], torch.Tensor] = {}

    def clear(self) -> None:
        """Another step begins: its tables may differ."""
        self._known = {}

    def of(
        self, prompt: tuple[str, int], rows: range, table: Sequence[int], block_size: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `rows` of a prompt: its request and the group of layers, whose table is given. Raises as `rows.places`."""
        key = prompt, rows
        if key not in self._known:
            found = torch.from_numpy(places(rows, table, block_size))
            if device.type == "cuda":
                found = found.pin_memory()
            self._known[key] = found.to(device, non_blocking=True)
        blocks, offsets = self._known[key]
        return blocks, offsets


FORMS: Sequence[Read] = (read_rows, read_columns)


def require_shape(name: str, pages: torch.Tensor, layer: LayerLayout, heads: int, dtype: str) -> None:
    """Raise ModelError unless the tensor is pages of `heads` KV heads of this layer, in `dtype`."""
    want = (heads, layer.key_dim + layer.value_dim)
    if pages.ndim != 4 or (pages.shape[1], pages.shape[3]) != want or layer.key_dim != layer.value_dim:
        raise ModelError(
            f"vLLM's KV cache of {name} has shape {tuple(pages.shape)}, not [blocks, {want[0]}, rows, {want[1]}]",
            "use a version of vLLM that is in the stated range, and a model with plain attention",
        )
    if str(pages.dtype).removeprefix("torch.") != dtype:
        raise ModelError(
            f"vLLM's KV cache of {name} is {pages.dtype}, the model's layout has {dtype}",
            "KV caches of another type, such as fp8, cannot be handed over: leave kv_cache_dtype at auto",
        )


def detect(pages: torch.Tensor, write: Write, layer: LayerLayout) -> Read:
    """The form of these pages, found by writing known rows and reading them back. They are written across the end of a
    block into the last two blocks. ModelError if no known form reads them. The blocks are empty afterwards, as before.
    """
    count, heads, size, _ = pages.shape
    rows = torch.arange((count - 2) * size + size - 3, (count - 2) * size + size + 3, device=pages.device)
    shape = (len(rows), heads, layer.key_dim)
    # Whole numbers below 251, exact in every type. 251 is a prime: rows, heads and places a power of two apart differ.
    known = torch.arange(2 * rows[:1].numel() * shape[0] * heads * layer.key_dim, device=pages.device) % 251
    keys, values = (part.reshape(shape).to(pages.dtype) for part in known.chunk(2))
    write(keys, values, rows)
    try:
        for read in FORMS:
            got = read(pages, rows // size, rows % size)
            if all(torch.equal(a[0].transpose(0, 1), b) for a, b in zip(got, (keys, values), strict=True)):
                return read
    finally:
        pages[-2:].zero_()
    raise ModelError(
        f"vLLM's KV cache of shape {tuple(pages.shape)} {pages.dtype} holds its rows in an unknown order",
        "on a CPU use float32; on a GPU, an attention backend whose rows hold key and value side by side",
    )
