"""YaRN with `truncate: false` at 6,000 prompt tokens: unpatched mlx-lm gives wrong tokens, the patch the right ones.

The model has one layer of each kind: without the patch, 62 of the 64 tokens are others.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.fleets import running, write_hosts

PROMPT_TOKENS = 6000
LAYERS = ["sliding_attention", "full_attention"]


@pytest.mark.timeout(600)
def test_gpt_oss_with_yarn_is_exact_at_6000_tokens(tmp_path: Path) -> None:
    model = tiny_models.make("gpt_oss_yarn", tmp_path / "model", num_hidden_layers=len(LAYERS), layer_types=LAYERS)
    chance = random.Random(1)
    tokens = [chance.randrange(8, tiny_models.VOCAB) for _ in range(PROMPT_TOKENS)]
    options: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    with (
        running(
            write_hosts(tmp_path, {"m": model}, prefill={"chunk_tokens": 512}, decode={"chunk_tokens": 512})
        ) as fleet,
        fleet.client() as client,
    ):
        answers = [
            client.generate("m", tokens=tokens, cache_salt="handed over", local_prefill=False, split="off", **options),
            # From the KV that it has just computed: transformers' answer to it.
            client.generate("m", tokens=tokens, alone="prefill", cache_salt="handed over", **options),
            client.generate("m", tokens=tokens, alone="decode", cache_salt="decode", **options),
        ]
        with fleet.http("m-decode") as http:
            findings = http.get("/health").json()["preflight"]
    first, *others = [[token.id for token in answer.tokens] for answer in answers]
    assert all(tokens == first for tokens in others)
    assert len(set(first)) > 12
    assert answers[0].metrics.decode_computed_tokens == 1
    assert [f["status"] for f in findings if f["component"] == "rope"] == ["patched"]
