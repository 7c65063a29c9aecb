"""planning/verdicts.py: what is known of a model by its config.json, before anything else of it is here."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.planning.verdicts import verdict


@pytest.mark.parametrize(
    ("config", "engine", "shown"),
    [
        ({"model_type": "llama"}, "transformers", "exact"),
        ({"model_type": "llama"}, "mlx", "exact"),
        ({"model_type": "llama"}, "vllm", "exact"),
        ({"model_type": "qwen3"}, "vllm", "exact"),  # one of its rows, with a window on some layers, is refused
        ({"model_type": "nemotron_h"}, "transformers", "patched"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "transformers", "exact"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_text"}}, "transformers", "exact"),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "transformers", "patched"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gpt_oss"}}, "transformers", "patched"),
        (
            {"model_type": "qwen3_next"},
            "vllm",
            "unknown: not on a CPU: vLLM cannot compute this model: AssertionError: CPU GDN attention requires BF16.",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "dynamic"}},
            "transformers",
            "refused: model type 'phi3' cannot be served: rope type 'dynamic': its frequencies change with the length "
            "of the prompt",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "mlx",
            "refused: model type 't5' cannot be served: it is not a decoder alone",
        ),
        (
            {},
            "transformers",
            "unknown: disagg's tests have not compared this model type: disagg verify does",
        ),
    ],
)
def test_a_config_is_enough_for_a_verdict(config: dict[str, Any], engine: str, shown: str) -> None:
    assert str(verdict(config, engine)) == shown


def test_the_text_part_of_llama4_alone_is_not_what_the_whole_model_is() -> None:
    assert verdict({"model_type": "llama4_text"}, "transformers").state == "refused"


def test_a_refusal_of_disaggs_own_is_sure_and_what_a_framework_said_of_a_tiny_model_is_not() -> None:
    assert verdict({"model_type": "minimax"}, "transformers").sure
    assert verdict({"model_type": "minimax"}, "vllm").sure
    assert not verdict({"model_type": "bitnet"}, "transformers").sure
    assert not verdict({"model_type": "llama"}, "transformers").sure
