"""Rows of keys and values in vLLM's page tensors. States are in `states`.

vLLM shows every layer's pages as [blocks, heads, rows of a block, key_dim + value_dim]. The attention backends of GPUs,
and those of latent attention, have in each row its key, then its value. That of CPUs has, per block and head, all keys
as [key_dim, rows], then all values as [rows, value_dim]. Which of the two a tensor has is not guessed: `detect` writes
rows with vLLM's own operation and takes the form that reads them back.

A request has one table of block ids per group of layers. Row p of a layer lies in block table[p // block_size], at
p % block_size. Block 0 stands for a block that has been given up, as those behind a sliding window are.

Whole blocks are copied in the order of the computation, before a later step can reuse one, and put in the order of the
wire afterwards, which on a CPU is the sender's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from disagg.api.layout import LayerLayout
from disagg.errors import ModelError

NULL_BLOCK = 0
# Pages [blocks, heads, rows, key_dim + value_dim], contiguous, and key_dim -> views of keys and values, [blocks, heads,
# rows, dim].
Form = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
# Write keys and values [T, heads, dim] at these slots (block * block size + offset), with vLLM's own operation.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def in_rows(pages: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row holds its key, then its value."""
    return pages[..., :key_dim], pages[..., key_dim:]


def in_columns(pages: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys of a block come first, transposed; then all values."""
    count, heads, size, width = pages.shape
    flat = pages.view(count, heads, size * width)
    keys = flat[..., : size * key_dim].view(count, heads, key_dim, size).transpose(2, 3)
    return keys, flat[..., size * key_dim :].view(count, heads, size, width - key_dim)


FORMS: Sequence[Form] = (in_rows, in_columns)


class PageRows(NamedTuple):
    """Where rows lie: in these blocks, a tensor of ids, from the row `first` of the first one on."""

    blocks: torch.Tensor
    first: int
    rows: int


class CopiedRows(NamedTuple):
    """keys, values: [1, heads, T, dim], in memory of their own. fill: writes them; to be called once, on any thread."""

    keys: torch.Tensor
    values: torch.Tensor
    fill: Callable[[], None]


def read(pages: torch.Tensor, where: PageRows, form: Form, key_dim: int) -> CopiedRows:
    """Copy the blocks of these rows. What is left to do, `fill` does."""
    held = pages.index_select(0, where.blocks)
    sources = [source.transpose(0, 1) for source in form(held, key_dim)]
    targets = [source.new_empty(source.shape) for source in sources]

    def fill() -> None:
        with torch.inference_mode():  # they may have been made in it
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        sources.clear()  # the last of the copied blocks

    wanted = slice(where.first, where.first + where.rows)
    keys, values = (target.flatten(1, 2)[None, :, wanted] for target in targets)
    return CopiedRows(keys, values, fill)


class PageTables:
    """Where rows lie, as tensors of a device. Layers of a group that keep the same rows of a prompt share them: one
    copy per step, for which the computing stream does not wait."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int], range], PageRows] = {}

    def clear(self) -> None:
        """Another step begins: its tables may differ."""
        self._known = {}

    def of(
        self,
        prompt: tuple[str, int],
        rows: range,
        table: Sequence[int],
        block_size: int,
        device: torch.device,
        *,
        pieces: int = 1,
    ) -> PageRows:
        """The rows of the pages that hold `rows` of a prompt. prompt: its request, and the group of layers whose table
        is given. pieces: the pages are cut into so many for each block. Raises what `blocks_of` raises."""
        key = prompt, rows
        if key not in self._known:
            ids = [block * pieces + piece for block in blocks_of(rows, table, block_size) for piece in range(pieces)]
            blocks = torch.tensor(ids, pin_memory=device.type == "cuda")
            self._known[key] = PageRows(blocks.to(device, non_blocking=True), rows.start % block_size, len(rows))
        return self._known[key]


def blocks_of(rows: range, table: Sequence[int], block_size: int) -> Sequence[int]:
    """The blocks that hold `rows`, in their order. ModelError if the request does not have one of them."""
    first, last = rows.start // block_size, (rows.stop - 1) // block_size
    blocks = [*table[first : last + 1], *[NULL_BLOCK] * (last + 1 - max(first, len(table)))]
    if NULL_BLOCK in blocks:
        row = max(rows.start, (first + blocks.index(NULL_BLOCK)) * block_size)
        raise ModelError(f"vLLM gave up the block of row {row} before it was read", "report this with vLLM's version")
    return blocks


def require_shape(
    name: str, pages: torch.Tensor, layer: LayerLayout, dtype: str, *, heads: int, block_size: int
) -> None:
    """Raise ModelError unless the tensor is pages of `heads` KV heads of this layer, in `dtype`, each of a block or of
    an equal piece of one: some attention operations have shorter blocks than vLLM's tables."""
    want = (heads, block_size, layer.key_dim + layer.value_dim)
    fits = pages.ndim == len(want) + 1 and (pages.shape[1], pages.shape[3]) == (want[0], want[2])
    if not fits or block_size % pages.shape[2]:
        raise ModelError(
            f"vLLM's KV cache of {name} has shape {tuple(pages.shape)}, not [blocks, {', '.join(map(str, want))}]",
            "use a version of vLLM that is in the stated range, and a model with plain or latent attention",
        )
    if str(pages.dtype).removeprefix("torch.") != dtype:
        raise ModelError(
            f"vLLM's KV cache of {name} is {pages.dtype}, the model's layout has {dtype}",
            "KV caches of another type, such as fp8, cannot be handed over: leave kv_cache_dtype at auto",
        )


def detect(pages: torch.Tensor, write: Write, layer: LayerLayout) -> Form:
    """The form of these pages, found by writing known rows and reading them back. They are written across the end of a
    block into the last two blocks. ModelError if no known form reads them. The blocks are empty afterwards, as before.
    """
    count, heads, size, _ = pages.shape
    rows = torch.arange((count - 2) * size + size - 3, (count - 2) * size + size + 3, device=pages.device)
    shapes = [(len(rows), heads, dim) for dim in (layer.key_dim, layer.value_dim)]
    # Whole numbers below 251, exact in every type. 251 is a prime: rows, heads and places a power of two apart differ.
    counts = [math.prod(shape) for shape in shapes]
    known = (torch.arange(sum(counts), device=pages.device) % 251).split(counts)
    keys, values = (part.reshape(shape).to(pages.dtype) for part, shape in zip(known, shapes, strict=True))
    write(keys, values, rows)
    try:
        where = PageRows(torch.tensor([count - 2, count - 1], device=pages.device), size - 3, len(rows))
        for form in FORMS:
            got = read(pages, where, form, layer.key_dim)
            got.fill()
            if all(torch.equal(a[0].transpose(0, 1), b) for a, b in zip(got[:2], (keys, values), strict=True)):
                return form
    finally:
        pages[-2:].zero_()
    raise ModelError(
        f"vLLM's KV cache of shape {tuple(pages.shape)} {pages.dtype} holds its rows in an unknown order",
        "on a CPU use float32; on a GPU, an attention backend whose rows hold key and value side by side",
    )
