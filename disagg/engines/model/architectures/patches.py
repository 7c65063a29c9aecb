"""Every patch: what a framework computes otherwise than a checkpoint's configuration states, and disagg sets right
after the model is loaded, or, of vLLM, before it is. `Architecture.mlx_model` sets right how it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures import (
    activations,
    cohere,
    delta,
    experts,
    gemma,
    gpt,
    indexed,
    latent,
    llama4,
    mamba,
    olmo,
    plain,
    weights,
)
from disagg.engines.model.architectures.base import Patch


def _torch(what: str, needed_by: str, apply: Callable[[Any], list[PreflightFinding]]) -> Patch:
    return Patch(what, "transformers", "5.23", tuple(needed_by.split()), apply)


def _mlx(what: str, needed_by: str, apply: Callable[[Any], list[PreflightFinding]]) -> Patch:
    return Patch(what, "mlx-lm", "0.32", tuple(needed_by.split()), apply)


def _vllm(what: str, needed_by: str, apply: Callable[[Any], list[PreflightFinding]]) -> Patch:
    return Patch(what, "vllm", "0.32", tuple(needed_by.split()), apply)


PATCHES: Final[tuple[Patch, ...]] = (
    _mlx(
        "rotary frequencies other than config.json states",
        "gpt_oss_yarn olmo3 granitemoehybrid_groups glm gemma3n_scaled",
        plain.stated_ropes,
    ),
    _mlx("rope_interleave=false ignored", "deepseek_v3_halves glm4_moe_lite_halves", latent.halves_rotated),
    _torch("`truncate` of a YaRN of one kind of layers ignored", "gemma3n_scaled", plain.untruncated_ropes),
    _mlx("failure on several prompts in a batch", "gemma2", gemma.masks_of_several),
    _mlx("the same, as positions of one are computed", "gpt_bigcode", gpt.positions_of_several),
    _mlx("another form of GELU", "gemma starcoder2 gpt_neox gpt_bigcode", activations.stated_gelus),
    _mlx("windows ignored", "mistral_windowed gemma2 qwen3_windowed mimo_v2_flash", plain.stated_windows),
    _mlx("states of shorter prompts in a batch forgotten", "nemotron_h", mamba.lengths_of_mamba),
    _mlx("the same, of other layers", "mamba jamba olmo_hybrid", mamba.states_of_shorter_prompts),
    _torch("states of earlier chunks forgotten", "mamba falcon_mamba jamba", mamba.states_of_earlier_chunks),
    _mlx("1 + weight of norms rounded, unless in float32", "", gemma.unrounded_norms),
    _mlx("root of the width rounded, unless in bfloat16", "gemma3_text_wide", gemma.unrounded_scales),
    _mlx("time steps limited", "granitemoehybrid", mamba.unlimited_time_steps),
    _mlx(
        "all groups of a Mamba layer normalised at once",
        "granitemoehybrid_groups mamba2 falcon_h1",
        mamba.grouped_norms,
    ),
    _mlx("clip_qkv ignored", "olmo", olmo.stated_clips),
    _mlx("epsilons of norms", "mamba_epsilon", mamba.stated_epsilons),
    _mlx("experts chosen without their bias", "ernie4_5_moe", experts.biased_experts),
    _mlx("weights of chosen experts not normalised", "qwen2_moe_normalised", experts.normalised_experts),
    _mlx("weight of a single expert not normalised", "dots1_single", experts.single_experts),
    _mlx("weights of chosen experts normalised", "jamba", experts.unnormalised_experts),
    _mlx("experts chosen that are in no chosen group", "deepseek_v3_groups", experts.groups_of_experts),
    _mlx("indexers' keys normalised with another epsilon (set right when it is loaded)", "", indexed.indexer_norms),
    _mlx("caches of chunks that cannot be merged (the same)", "", llama4.batched_chunks),
    _mlx("output heads and biases other than the checkpoint has (the same)", "", weights.stated_weights),
    _torch("embeddings that are the output head not tied (the same)", "", weights.tied_heads),
    _torch("biases by which experts are chosen rounded (the same)", "", experts.unrounded_biases),
    _torch("epsilons ignored", "glm4_moe_lite_epsilon mimo_v2_flash_epsilon", plain.stated_epsilon),
    _mlx("keys and values of heads kept in place of latent vectors (the same)", "", latent.kept_latents),
    _vllm("windows longer by one", "cohere2", cohere.shorter_windows),
    _vllm("queries of far tokens not scaled", "ministral3", plain.scaled_queries),
    _vllm("failure on prompts of one token, on a CPU", "qwen3_5 qwen3_5_moe", delta.prompts_of_one_token),
)
MLX_PATCHES: Final = tuple(patch for patch in PATCHES if patch.framework == "mlx-lm")
TRANSFORMERS_PATCHES: Final = tuple(patch for patch in PATCHES if patch.framework == "transformers")
VLLM_PATCHES: Final = tuple(patch for patch in PATCHES if patch.framework == "vllm")
