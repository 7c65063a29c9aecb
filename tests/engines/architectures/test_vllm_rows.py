"""tests/surveys/vllm_prefill.py: what a cell says."""

from __future__ import annotations

import pytest

from disagg.api.events import TokenLogprob
from tests.engines.architectures.configs import config
from tests.surveys.architectures import is_clear
from tests.surveys.tables import known
from tests.surveys.vllm_prefill import Answers, verdict, with_wide_heads

TEXT, OTHER = [5, 6, 7, 8], [5, 6, 7, 9]


@pytest.mark.parametrize(
    ("answers", "shown"),
    [
        ({2: Answers(TEXT, TEXT, TEXT)}, "exact"),
        (
            {2: Answers(TEXT, TEXT, TEXT), 65: Answers(OTHER, TEXT, TEXT)},
            "**differs** from vLLM at 65 tokens, by the hand-off",
        ),
        ({2: Answers(TEXT, TEXT, OTHER)}, "**differs** from vLLM at 2 tokens, also without a hand-off"),
        ({2: Answers(TEXT, OTHER, TEXT)}, "**differs** from mlx-lm at 2 tokens"),
        ({2: Answers([5] * 4, [5] * 4, [5] * 4)}, "**nothing shown**: the answers repeat a token"),
    ],
)
def test_a_verdict_names_the_first_prompt_that_is_answered_otherwise(answers: dict[int, Answers], shown: str) -> None:
    assert verdict(answers) == shown


@pytest.mark.parametrize(("second", "clear"), [(-1.002, True), (-1.0005, False), (-1.0, False)])
def test_an_answer_with_two_tokens_that_rounding_decides_between_shows_nothing(second: float, clear: bool) -> None:
    certain = TokenLogprob(5, -1.0, ((5, -1.0), (6, -2.0)))
    assert is_clear([certain, TokenLogprob(7, -1.0, ((7, -1.0), (8, second)))]) is clear


def test_heads_are_as_wide_as_vllms_attention_on_cpus_needs_them() -> None:
    wide = with_wide_heads(config("gemma4"))["text_config"]
    assert (wide["head_dim"], wide["global_head_dim"], wide["num_attention_heads"]) == (32, 64, 2)
    assert "head_dim" not in with_wide_heads(config("olmo2"))
    assert with_wide_heads(known()["gpt_oss"])["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gpt_bigcode"])
def test_heads_that_a_configuration_states_twice_are_changed_twice(name: str) -> None:
    wide = with_wide_heads(known()[name])
    assert wide["n_head"] == wide["num_attention_heads"] == 2
    assert wide["num_key_value_heads"] == (1 if name == "gpt_bigcode" else 2)


def test_a_changed_configuration_is_still_one_of_its_type() -> None:
    mamba2, mimo = (with_wide_heads(known()[name]) for name in ("mamba2", "mimo_v2_flash"))
    assert mamba2["num_heads"] * mamba2["head_dim"] == mamba2["expand"] * mamba2["hidden_size"]
    assert mimo["swa_head_dim"] == mimo["head_dim"]
    assert mimo["swa_num_key_value_heads"] == 2 * mimo["num_key_value_heads"]
    assert mimo["swa_num_attention_heads"] == mimo["num_attention_heads"]
