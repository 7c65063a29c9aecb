"""planning/refusals.py: the rules that a load and the verdict before it share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from disagg.engines.model.architectures import ARCHITECTURES
from disagg.engines.model.architectures.base import no_rope
from disagg.engines.model.rope import _FORMULAS
from disagg.planning.refusals import (
    ACTIVATIONS,
    ROPES,
    RULES,
    RULES_OF_VLLM,
    UNROTATED,
    for_context,
    refusal,
    refusal_of_rope,
    refusal_of_vllm,
)

NONE = SimpleNamespace()
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def config(model_type: str, **stated: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type=model_type, **stated)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (config("llama"), ""),
        (config("t5", is_encoder_decoder=True), "it is not a decoder alone"),
        (config("gemma3_text", use_bidirectional_attention=True), "its attention is bidirectional"),
        (config("gemma4_text", use_bidirectional_attention="vision"), ""),
        (config("newer", kv_lora_rank=512), "its form of latent attention (MLA) is not handed over"),
        (config("deepseek_v3", kv_lora_rank=512), ""),
        (config("kimi_linear", num_experts_per_tok=1, norm_topk_prob=True), "mlx-lm ignores norm_topk_prob if"),
        (config("kimi_linear", tie_word_embeddings=True), ""),
        (
            config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=30.0),
            "mlx-lm cannot compute it without",
        ),
        (config("gpt2", scale_attn_weights=False), "mlx-lm ignores how its config.json scales attention"),
        (config("minicpm3", hidden_size=64, num_attention_heads=4, v_head_dim=8), "mlx-lm ignores v_head_dim = 8"),
        (config("cohere2", hidden_size=64, num_attention_heads=4), ""),
        (config("cohere2", hidden_size=64, num_attention_heads=4, head_dim=8), "its heads have 32 elements"),
        (config("lfm2", full_attn_idxs=[2]), ""),
        (config("lfm2", full_attn_idxs=[]), "none of its layers has attention"),
        (config("lfm2_moe", layer_types=["conv", "conv"]), "none of its layers has attention"),
        (config("mamba2", time_step_limit=(0.0, float("inf"))), ""),
        (config("mamba2", time_step_limit=(0.0, 0.1)), "transformers limits its time steps in prompts"),
        (config("bailing_hybrid", norm_topk_prob=False), "mlx-lm ignores norm_topk_prob = false"),
        (config("bailing_hybrid", norm_topk_prob=True), ""),
        (config("qwen3_5_moe_text", norm_topk_prob=False), "transformers ignores norm_topk_prob = false"),
        (
            config("qwen3_vl_moe_text", norm_topk_prob=False, hidden_size=64, moe_intermediate_size=48),
            "transformers ignores norm_topk_prob = false",
        ),
        (
            config("qwen3_vl_moe_text", hidden_size=96, moe_intermediate_size=48),
            "transformers cannot tell the sides of its experts' weights",
        ),
        (config("deepseek_v3", n_group=2, topk_group=1, n_routed_experts=4, num_experts_per_tok=2), ""),
        (
            config("deepseek_v3", n_group=2, topk_group=1, n_routed_experts=4, num_experts_per_tok=3),
            "each token has 3 experts, and the groups that are chosen have 2",
        ),
        (config("kimi_linear", num_expert_group=1, num_experts=4, num_experts_per_tok=3, topk_group=1), ""),
        (config("phi3", rope_parameters={"type": "dynamic"}), ""),
        (config("jamba", rope_parameters={"type": "spiral"}), ""),
        (
            config("gemma3_text", rope_parameters={"full_attention": {"rope_type": "spiral"}}),
            "rope type 'spiral' is not",
        ),
        (config("phi3", rope_parameters={**LONGROPE, "original_max_position_embeddings": 4096}), ""),
        (
            config(
                "phi3",
                rope_parameters={**LONGROPE, "original_max_position_embeddings": 4096},
                max_position_embeddings=131072,
            ),
            "it rotates tokens otherwise if its prompt has more than 4096 (rope type 'longrope'); with a context of at "
            "most 4096 it is served",
        ),
        (config("minimax"), "mlx-lm has another model of this name"),
        (config("recurrent_gemma"), "transformers keeps the states of one prompt at a time"),
        (config("longcat_flash", kv_lora_rank=512), "each of its layers keeps latent vectors twice"),
    ],
)
def test_what_config_json_states_is_enough_to_refuse_a_model(given: SimpleNamespace, reason: str) -> None:
    found = refusal(given, NONE)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("model_type", "stated", "refused"),
    [
        ("llama", "silu", False),
        ("llama", "swish", False),
        ("llama", "relu", True),
        ("gemma", "gelu", False),  # set right
        ("gemma", "gelu_new", False),
        ("gemma", "silu", True),
    ],
)
def test_an_activation_function_that_mlx_lm_does_not_compute_is_refused(
    model_type: str, stated: str | None, refused: bool
) -> None:
    default = "gelu_pytorch_tanh" if model_type == "gemma" else "silu"
    found = refusal(config(model_type, hidden_act=stated), SimpleNamespace(hidden_act=default))
    assert found == (f"mlx-lm ignores hidden_act = {stated!r}, and computes {default!r}" if refused else "")


def test_an_activation_function_that_is_null_is_refused_and_one_that_is_left_out_is_the_default() -> None:
    silu = SimpleNamespace(hidden_act="silu")
    assert refusal(config("llama"), silu) == ""
    assert refusal(config("llama", hidden_act=None), silu).startswith("its config.json has null for hidden_act")
    assert refusal(config("llama", hidden_act=None), NONE) == ""


def test_llama4s_text_part_is_refused_alone_only() -> None:
    assert refusal(config("llama4_text"), NONE, "llama4_text").startswith("mlx-lm has another model of this name")
    assert not refusal(config("llama4_text"), NONE, "llama4")


@pytest.mark.parametrize(
    ("given", "device", "ranks", "reason"),
    [
        (config("llama"), "cpu", 1, ""),
        (config("cohere2", rms_norm_eps=1e-5), "cuda", 1, "its config.json has rms_norm_eps"),
        (config("cohere2", rms_norm_eps=None), "cuda", 1, ""),
        (config("deepseek_v3", rope_interleave=False), "cuda", 1, "vLLM ignores rope_interleave = false"),
        (config("glm4_moe_lite"), "cuda", 1, ""),
        (config("ernie4_5_moe"), "cpu", 1, "vLLM chooses experts without their bias on a CPU"),
        (config("ernie4_5_moe"), "cuda", 1, ""),
        (config("olmoe", norm_topk_prob=True), "cuda", 1, "vLLM ignores norm_topk_prob"),
        (
            config("falcon_h1", attention_bias=True),
            "cuda",
            1,
            "vLLM ignores attention_bias, which transformers applies",
        ),
        (config("falcon_h1", mamba_proj_bias=True, projectors_bias=True), "cuda", 1, ""),
        (config("falcon_h1", mamba_proj_bias=True, projectors_bias=True), "cuda", 2, "several ranks of vLLM compute"),
        (config("llama4_text"), "cuda", 1, "what vLLM keeps of layers that attend within chunks"),
        (config("deepseek_v32"), "cuda", 1, "vLLM keeps the keys by which its layers choose tokens in 8"),
        (config("minicpm3"), "cpu", 1, "vLLM keeps the keys and values of every head"),
    ],
)
def test_what_config_json_states_is_enough_to_refuse_vllm(
    given: SimpleNamespace, device: str, ranks: int, reason: str
) -> None:
    found = refusal_of_vllm(given, device, ranks)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_ropes_that_are_accepted_have_a_formula_and_models_without_one_are_those_of_the_architectures() -> None:
    assert set(ROPES) == set(_FORMULAS)
    assert set(UNROTATED) == {name for name, one in ARCHITECTURES.items() if one.rope is no_rope}


def test_a_rule_reads_no_key_that_it_does_not_state() -> None:
    """A key that is left out of config.json has the default that is stored for the keys of the rules."""

    class Recorded(SimpleNamespace):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                read.add(name)
            return super().__getattribute__(name)

    for model_type, (keys, rule) in RULES.items():
        read: set[str] = set()
        rule(Recorded(model_type=model_type, **{key: 1 for key in keys if key != "time_step_limit"}))
        assert read <= {"model_type", *keys}, model_type
    for model_type, (keys, rule_of_vllm) in RULES_OF_VLLM.items():
        read = set()
        rule_of_vllm(Recorded(model_type=model_type, **dict.fromkeys(keys, 1)), "cpu", 2)
        assert read <= set(keys), model_type
    assert "hidden_act" in ACTIVATIONS


@pytest.mark.parametrize(("context", "refused"), [(4096, False), (4097, True)])
def test_a_rope_with_a_set_for_long_prompts_is_served_with_a_context_that_never_needs_it(
    context: int, refused: bool
) -> None:
    rope = for_context({**LONGROPE, "original_max_position_embeddings": 4096}, context)
    assert bool(refusal_of_rope(rope, 131072)) is refused
