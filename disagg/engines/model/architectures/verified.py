"""The architectures whose hand-off disagg's own tests compare with both frameworks alone, in float32, and the versions
of the frameworks that they ran with.

A model of another one, or on other versions, is served if the preflight finds no difference, but marked: `disagg
verify` compares its answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SERIES: Final[Mapping[str, str]] = {"transformers": "5.23", "mlx-lm": "0.32", "vllm": "0.32"}
"""The minor series of each package that computes."""

VERIFIED: Final = frozenset(
    {
        "cohere",
        "cohere2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "helium",
        "hunyuan_v1_dense",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "llama",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "nemotron_h",
        "olmo2",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
"""Verdicts by the `model_type` of the part that reads text. Written by `python -m tests.surveys.architectures`."""


def verified(architecture: str, versions: Mapping[str, str]) -> bool:
    """Whether the tests have compared this architecture on these versions of an engine's packages."""
    known = all(versions[name].startswith(f"{series}.") for name, series in SERIES.items() if name in versions)
    return known and architecture in VERIFIED
