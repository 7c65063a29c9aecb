"""The architectures whose hand-off disagg's own tests compare with both frameworks alone, in float32.

A model of another one is served if the preflight finds no difference, but marked: `disagg verify` compares its answers.
"""

from __future__ import annotations

from typing import Final

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
"""By the `model_type` of the part that reads text."""
