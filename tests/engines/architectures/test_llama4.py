"""llama4: chunks and temperatures at the position of each prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.errors import ModelError
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import CONTEXT, make, running
from tests.engines.mlx.mlx_parts import prompt, start

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48)


def test_a_prompt_beyond_a_chunk_goes_on_from_held_rows_and_is_audited(tmp_path: Path) -> None:
    with running(config("llama4"), tmp_path) as pair:
        first = prompt(150, seed=3)  # of chunks of 64
        other = [*first[:100], *prompt(90, seed=4)]
        pair.kv(first, salt="branches")
        answer = start(pair.decode, other, pair.kv(other, salt="branches"), max_tokens=16).result()
        pair.decode.warm_up()
        assert answer == pair.greedy(other, answer)
        assert pair.decode.info.audits


def test_the_text_model_of_that_name_in_mlx_lm_is_refused(tmp_path: Path) -> None:
    given = {key: value for key, value in config("llama4")["text_config"].items() if value is not None}
    make({**given, "architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1, 1, 1, 0, 1]}, tmp_path)
    with pytest.raises(ModelError, match="attends to all tokens in every layer"):
        MLXDecodeEngine(tmp_path, CONTEXT, OPTIONS)
