"""disagg/engines/model/fill.py: the marks around a gap, by a tokenizer's added tokens."""

from __future__ import annotations

import copy

import pytest

from disagg.engines.model.fill import KNOWN, ends_of_fill, marks_of
from disagg.engines.model.text import HFTokenizer
from disagg.errors import RequestError
from tests import tiny_models

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


@pytest.mark.parametrize(
    ("added", "prompt"),
    [
        (QWEN, "<|fim_prefix|>a(<|fim_suffix|>)b<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>a(<fim_suffix>)b<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>a(<｜fim▁hole｜>)b<｜fim▁end｜>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX])b[PREFIX]a("),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>)b<[fim-prefix]>a(<[fim-middle]>"),
    ],
)
def test_each_family_has_its_own_marks_in_its_own_order(added: tuple[str, ...], prompt: str) -> None:
    marks = marks_of({token: at for at, token in enumerate(added)})
    assert marks is not None and marks.prompt("a(", ")b") == prompt


def test_no_two_families_are_taken_for_each_other() -> None:
    for one in KNOWN:
        assert marks_of(dict.fromkeys(one.marks, 1)) is one


def test_a_model_without_such_tokens_fills_no_gap() -> None:
    of_codegeex = {"<|code_prefix|>": 1, "<|code_suffix|>": 2, "<|code_middle|>": 3}  # its gap is within a chat
    assert (
        marks_of({"<s>": 1, "<|fim_prefix|>": 2}) is None
        and marks_of(of_codegeex) is None
        and ends_of_fill({"<s>": 1}) == ()
    )
    tokenizer = HFTokenizer(tiny_models.tokenizer(), frozenset({1}), tiny_models.VOCAB)
    with pytest.raises(RequestError, match=r"^suffix: this model's tokenizer has no tokens"):
        tokenizer.encode("a", suffix="b")


def test_a_prompt_with_a_gap_has_the_marks_as_tokens_and_what_fills_it_ends_at_any_of_them() -> None:
    made = copy.deepcopy(tiny_models.tokenizer(add_bos=True))
    made.add_special_tokens({"additional_special_tokens": [*QWEN]})
    tokenizer = HFTokenizer(made, frozenset({1}), len(made))
    ids = made.convert_tokens_to_ids(list(QWEN))
    tokens = tokenizer.encode("def f(", suffix="):\n    pass")
    assert tokens[:2] == [tiny_models.BOS_ID, ids[0]] and tokens[-1] == ids[2]
    assert [token for token in tokens if token in ids] == ids[:3]
    assert tokenizer.encode("", suffix="x")[:2] == [tiny_models.BOS_ID, ids[0]]
    assert list(tokenizer.ends_of_fill) == ids
