"""disagg/engines/model/evidence.py: a fixed text for all hosts of a model, and what an engine finds likeliest after
it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.api.status import Evidence
from disagg.engines.model.evidence import LEAST_TOKENS, PLACES, gather, prompt_length
from disagg.engines.model.text import HFTokenizer
from disagg.kv.fingerprint import token_hash
from tests import tiny_models

FULL = LayerLayout("full", 2, 16, 16)
SLIDING = LayerLayout("sliding", 2, 16, 16, window=1024)
WIDE = LayerLayout("sliding", 1024, 256, 256, window=4096)


@pytest.mark.parametrize(
    ("layers", "context", "length"),
    [
        ((FULL,), 8192, LEAST_TOKENS),
        ((FULL, SLIDING), 8192, 1024 + LEAST_TOKENS),
        ((FULL, SLIDING), 1000, 999),
        ((FULL, WIDE), 8192, LEAST_TOKENS),  # 8 GiB of KV
        ((FULL,), 2, 1),
        ((FULL,), 1, 1),
    ],
)
def test_the_prompt_goes_beyond_the_longest_window_if_context_and_memory_allow(
    layers: tuple[LayerLayout, ...], context: int, length: int
) -> None:
    assert prompt_length(Layout(layers, "float32"), context) == length


@pytest.fixture
def tokenizer(tmp_path: Path) -> HFTokenizer:
    tiny_models.tokenizer().save_pretrained(tmp_path)
    tiny_models.write_json(tmp_path / "config.json", {**tiny_models.COMMON, "model_type": "llama"})
    return HFTokenizer.load(tmp_path)


def test_an_engine_is_asked_for_its_likeliest_tokens_after_the_end_of_a_text(tokenizer: HFTokenizer) -> None:
    asked: list[tuple[Sequence[int], int]] = []

    def likeliest(tokens: Sequence[int], last: int) -> Sequence[int]:
        asked.append((tokens, last))
        return range(last)

    evidence = gather(tokenizer, Layout((FULL,), "float32"), 4096, likeliest)

    ((tokens, last),) = asked
    assert (len(tokens), last) == (LEAST_TOKENS, PLACES)
    assert len(set(tokens)) > 50, "text, and not one token again and again"
    assert evidence == Evidence(token_hash(tokens)[:16], LEAST_TOKENS, tuple(range(PLACES)))


def test_of_a_text_that_is_shorter_every_place_is_asked_for(tokenizer: HFTokenizer) -> None:
    evidence = gather(tokenizer, Layout((FULL,), "float32"), 5, lambda tokens, last: range(last))
    assert (evidence.tokens, evidence.likeliest) == (4, (0, 1, 2, 3))
