"""disagg/engines/vllm/pages.py: rows out of page tensors, in the two forms that vLLM has, and in no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disagg.api.layout import LayerLayout
from disagg.engines.vllm import pages as page_forms
from disagg.engines.vllm.pages import FORMS, PageRows, PageTables, detect, read, require_shape
from disagg.errors import ModelError

BLOCKS, HEADS, SIZE, DIM = 5, 2, 8, 4
LAYER = LayerLayout("full", HEADS, DIM, DIM)
LATENT = LayerLayout("full", 1, 6, 2)
Put = Callable[[torch.Tensor, int, int, torch.Tensor, torch.Tensor], None]


def in_rows(pages: torch.Tensor, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
    pages[block, :, offset] = torch.cat([key, value], -1)


def in_columns(pages: torch.Tensor, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
    halves = pages.view(BLOCKS, HEADS, SIZE * 2, DIM)
    halves[:, :, :SIZE].view(BLOCKS, HEADS, DIM, SIZE)[block, :, :, offset] = key
    halves[:, :, SIZE:][block, :, offset] = value


def values_first(pages: torch.Tensor, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
    in_rows(pages, block, offset, value, key)


def writer(pages: torch.Tensor, put: Put) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            put(pages, slot // SIZE, slot % SIZE, key, value)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("put", "form"), [(in_rows, page_forms.in_rows), (in_columns, page_forms.in_columns)])
def test_the_form_of_pages_is_found_by_writing_and_reading(put: Put, form: object, dtype: torch.dtype) -> None:
    pages = torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=dtype)
    assert detect(pages, writer(pages, put), LAYER) is form
    assert not pages.any()


def test_the_latent_and_the_rotated_part_of_latent_attention_are_keys_and_values_of_different_widths() -> None:
    pages = torch.zeros(BLOCKS, 1, SIZE, 8)
    assert detect(pages, writer(pages, in_rows), LATENT) is page_forms.in_rows
    pages.copy_(torch.randn(pages.shape))
    got = read(pages, PageRows(torch.tensor([3, 1]), 6, 4), page_forms.in_rows, LATENT.key_dim)
    got.fill()
    rows = torch.cat([pages[3, 0, 6:], pages[1, 0, :2]])
    assert torch.equal(got.keys[0, 0], rows[:, :6]) and torch.equal(got.values[0, 0], rows[:, 6:])


def test_pages_in_an_unknown_form_are_refused() -> None:
    pages = torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM)
    with pytest.raises(ModelError, match="holds its rows in an unknown order"):
        detect(pages, writer(pages, values_first), LAYER)


@pytest.mark.parametrize("put", [in_rows, in_columns])
def test_rows_come_out_in_the_order_of_the_tokens_from_any_blocks(put: Put) -> None:
    pages = torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM)
    form = detect(pages, writer(pages, put), LAYER)
    keys, values = torch.randn(12, HEADS, DIM), torch.randn(12, HEADS, DIM)
    blocks, offsets = torch.tensor([3] * 4 + [1] * 8), torch.arange(4, 16) % SIZE
    writer(pages, put)(keys, values, blocks * SIZE + offsets)
    got = read(pages, PageRows(torch.tensor([3, 1]), 4, 12), form, DIM)
    got.fill()
    assert torch.equal(got.keys[0].transpose(0, 1), keys) and torch.equal(got.values[0].transpose(0, 1), values)


def test_a_later_step_may_overwrite_the_pages_of_rows_that_are_not_filled_yet() -> None:
    with torch.inference_mode():  # as vLLM computes; the sender's thread does not
        pages = torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM)
        want = pages[2, :, :, :DIM].clone()
        got = read(pages, PageRows(torch.tensor([2]), 0, SIZE), FORMS[0], DIM)
        pages.zero_()
    got.fill()
    assert torch.equal(got.keys[0], want)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((2, BLOCKS, SIZE, HEADS, DIM), torch.float32, r"not \[blocks, 2, 8, 8\]"),
        ((BLOCKS, HEADS, SIZE, DIM), torch.float32, r"not \[blocks, 2, 8, 8\]"),
        ((BLOCKS, HEADS + 1, SIZE, 2 * DIM), torch.float32, r"not \[blocks, 2, 8, 8\]"),
        ((BLOCKS, HEADS, SIZE - 2, 2 * DIM), torch.float32, r"not \[blocks, 2, 8, 8\]"),
        ((BLOCKS, HEADS, 2 * SIZE, 2 * DIM), torch.float32, r"not \[blocks, 2, 8, 8\]"),
        ((BLOCKS, HEADS, SIZE, 2 * DIM), torch.float8_e4m3fn, "the model's layout has float32"),
        ((BLOCKS, HEADS, SIZE, 2 * DIM), torch.bfloat16, "the model's layout has float32"),
    ],
)
def test_pages_of_another_shape_or_type_are_refused(shape: tuple[int, ...], dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        require_shape(
            "model.layers.0.attn", torch.zeros(shape, dtype=dtype), LAYER, "float32", heads=HEADS, block_size=SIZE
        )


def test_rows_of_blocks_that_pages_hold_in_pieces_come_out_in_the_order_of_the_tokens() -> None:
    """A table of blocks of 16 rows, pages of 8."""
    pages = torch.randn(2 * BLOCKS, HEADS, SIZE, 2 * DIM)
    require_shape("model.layers.0.attn", pages, LAYER, "float32", heads=HEADS, block_size=2 * SIZE)
    whole = pages.view(BLOCKS, 2, HEADS, SIZE, 2 * DIM).transpose(1, 2).flatten(2, 3)
    where = PageTables().of(("a", 0), range(20, 40), [4, 3, 1], 2 * SIZE, torch.device("cpu"), pieces=2)
    got = read(pages, where, page_forms.in_rows, DIM)
    got.fill()
    rows = torch.cat([whole[3], whole[1]], dim=1)[:, 4:24]
    assert torch.equal(got.keys[0], rows[..., :DIM]) and torch.equal(got.values[0], rows[..., DIM:])


def test_layers_that_keep_the_same_rows_share_their_places_within_a_step() -> None:
    places, cpu, table = PageTables(), torch.device("cpu"), [3, 1]
    first = places.of(("a", 0), range(4, 12), table, SIZE, cpu)
    assert (first.blocks.tolist(), first.first, first.rows) == ([3, 1], 4, 8)
    assert places.of(("a", 0), range(4, 12), table, SIZE, cpu) is first
    for id, group, rows in (("b", 0, range(4, 12)), ("a", 1, range(4, 12)), ("a", 0, range(5, 12))):
        assert places.of((id, group), rows, [2, 4], SIZE, cpu).blocks[0] == 2
    places.clear()
    assert places.of(("a", 0), range(4, 12), [4, 2], SIZE, cpu).blocks.tolist() == [4, 2]
