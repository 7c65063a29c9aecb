"""Why a model is refused by what its config.json states: rules that its load and the verdict before a download share.

A rule says why in words that follow "cannot be served:" or "vLLM cannot prefill it:", and nothing if it does not apply.
What only a loaded model shows is found by the preflight (engines/model/profile.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Config = Any
"""The configuration of the part that reads text, its keys as attributes: transformers' own, or `verdicts.stated`."""
Rule = tuple[tuple[str, ...], Callable[[Config], str]]
"""The keys that decide, in transformers' names, and why a model is refused."""
RuleOfVLLM = tuple[tuple[str, ...], Callable[[Config, str, int], str]]
"""The same with "cpu" or "cuda", and the ranks that share the heads."""

_KNOWN_AS: Final[Mapping[str, str]] = {"joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types whose own code, which their checkpoints bring, is that of another type."""
LATENT: Final = (
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
)
"""Model types whose latent attention (MLA) is known."""
UNROTATED: Final = (
    *("falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h"),
    *("gpt2", "gpt_bigcode"),  # which learn a vector of each position
)
"""Model types without a rotary embedding, whatever their configuration states of one."""
ROPES: Final = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
"""Rotary embeddings whose frequencies can be fixed."""
LEAST_HEADS: Final = 16
"""An indexer with fewer is refused. A token for which no head scores above 0 has a score of exactly 0, and which of
several equal tokens are chosen differs between frameworks, and in mlx-lm with the prompts beside it. Of tiny random
models the answers differed with 2, 4 and 8 heads, and not with 16; a token is among the equal ones by a chance of
2 ** -heads then. The published models have 32 and 64."""
MAX_LAYERS: Final = 10_000
_ROPES: Final = ("rope_parameters", "rope_scaling")
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MLX: Final = "mlx"
_READ_BY_MLX: Final = ("awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")
"""Forms of packed weights that mlx-lm 0.32 converts to its own when it reads them."""
ACTIVATIONS: Final = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act")
GELU, APPROXIMATE_GELU = "gelu", "gelu_pytorch_tanh"
SET_RIGHT: Final = ("gemma", "gpt_bigcode", "gpt_neox", "starcoder2")
"""Model types for which mlx-lm is set right to compute the exact GELU or its approximation."""
_SAME: Final[Mapping[str, str]] = {
    "swish": "silu",
    "gelu_python": GELU,
    "gelu_new": APPROXIMATE_GELU,
    "gelu_fast": APPROXIMATE_GELU,
    "gelu_accurate": APPROXIMATE_GELU,
}
"""transformers' other names of a function."""


def refusal(config: Config, defaults: Config, whole: str = "") -> str:
    """Why this model cannot be handed over with any engine; empty if it can. defaults: what transformers has for keys
    that config.json leaves out, as attributes. whole: the model type of config.json itself, which is another one if a
    part of the model reads text."""
    kind = str(config.model_type)
    if kind == whole == "llama4_text":  # as a part of llama4 it is served
        return "mlx-lm has another model of this name, which attends to all tokens in every layer"
    own = RULES[kind][1](config) if kind in RULES else ""
    return own or next((why for rule in _EVERY for why in (rule(config),) if why), "") or _activation(config, defaults)


def refusal_of_vllm(config: Config, device: str, ranks: int) -> str:
    """Why vLLM is refused for a model that it loads, and whose layers measure right; empty if it is not."""
    rule = RULES_OF_VLLM.get(str(config.model_type))
    return rule[1](config, device, ranks) if rule else ""


def refusal_of_rope(parameters: Mapping[str, Any], max_positions: int) -> str:
    """Why a rotary embedding is refused; empty if its frequencies are fixed. parameters: as transformers'
    rope_parameters. max_positions: tokens that the model reads."""
    kind = rope_type(parameters)
    if kind not in ROPES:
        return f"rope type {kind!r} is not known; {', '.join(ROPES)} are"
    if kind == "longrope" and parameters.get("short_factor") != parameters.get("long_factor"):
        original = parameters.get("original_max_position_embeddings")
        if original is not None and max_positions > float(original):
            return (
                f"it rotates tokens otherwise if its prompt has more than {original} (rope type {kind!r}); with a "
                f"context of at most {original} it is served"
            )
    return ""


def refusal_of_weights(config: Mapping[str, Any], engine: str) -> str:
    """Why an engine cannot read weights that are packed like this; empty if it can. config: config.json."""
    method = packing(config)
    if engine == "mlx":
        return f"mlx-lm does not read weights in the form {method}" if method not in ("", _MLX, *_READ_BY_MLX) else ""
    return "its weights are in mlx-lm's form, which only the engine mlx reads" if method == _MLX else ""


def packing(config: Mapping[str, Any]) -> str:
    """The form in which a config.json says that weights are packed; empty if they are not."""
    table = config.get("quantization_config")
    method = table.get("quant_method") if isinstance(table, Mapping) else None
    return _MLX if config.get("quantization") or (table is not None and not method) else str(method or "")


def damaged(config: Mapping[str, Any]) -> str:
    """Why no framework can read this config.json, in words that follow its name; empty if that is not obvious.
    transformers would make a list of all layers that it states, whatever that takes."""
    if not config.get("model_type") or not isinstance(config["model_type"], str):
        return "it names no model_type"
    part = config.get("text_config", config)
    if not isinstance(part, Mapping) or not part:
        return "its text_config is empty"
    return next((why for one in (config, part) if (why := _damaged_part(one))), "")


def _damaged_part(part: Mapping[str, Any]) -> str:
    depths = {key: part[key] for key in _DEPTHS if part.get(key) is not None}
    for key, count in depths.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            return f"{key} is {str(count)[:40]}, and no number of layers"
        if count > MAX_LAYERS:
            return f"{key} is {count:g}, more than {MAX_LAYERS:,}"
    kinds = part.get("layer_types")
    if isinstance(kinds, list) and any(len(kinds) < count for count in depths.values()):
        return f"it has {next(iter(depths.values()))} layers and {len(kinds)} layer_types"
    return next((f"its {key} is no table" for key in _ROPES if not isinstance(part.get(key) or {}, Mapping)), "")


def for_context(parameters: Mapping[str, Any], context: int) -> Mapping[str, Any]:
    """The same for prompts of at most `context` tokens: of a longrope whose second set is for longer ones, the first in
    place of both."""
    original = parameters.get("original_max_position_embeddings")
    if rope_type(parameters) != "longrope" or original is None or context > float(original):
        return parameters
    return {**parameters, "long_factor": parameters.get("short_factor")}


def longest_context(config: Config) -> int | None:
    """How many tokens the model reads: max_position_embeddings, or more with a YaRN factor; None if it states no
    limit."""
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope_type(rope) == "yarn":
        limit = max(limit, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or 0)))
    return limit or None


def refusal_of_context(config: Config, context: int) -> str:
    """Why it cannot be served with so many tokens; empty if it can."""
    longest = longest_context(config)
    return f"the model reads {longest} tokens, not {context}" if longest is not None and context > longest else ""


def known_as(model_type: str) -> str:
    """The model type under which transformers knows it."""
    return _KNOWN_AS.get(model_type, model_type)


def rope_type(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def keys(model_type: str) -> tuple[str, ...]:
    """The keys that decide whether a model of this type is refused."""
    own = (table[model_type][0] for table in (RULES, RULES_OF_VLLM) if model_type in table)
    return tuple(dict.fromkeys((*ACTIVATIONS, "max_position_embeddings", *(key for some in own for key in some))))


# Every model type


def _decoder_alone(config: Config) -> str:
    return "it is not a decoder alone" if getattr(config, "is_encoder_decoder", False) else ""


def _one_direction(config: Config) -> str:
    both = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    return "its attention is bidirectional" if both else ""


def _known_latents(config: Config) -> str:
    latents = getattr(config, "kv_lora_rank", None) and config.model_type not in LATENT
    return "its form of latent attention (MLA) is not handed over" if latents else ""


def _fixed_ropes(config: Config) -> str:
    if config.model_type in UNROTATED or getattr(config, "position_embedding_type", "rope") != "rope":
        return ""
    longest = getattr(config, "max_position_embeddings", None) or 0
    return next((why for one in _ropes(config) if (why := refusal_of_rope(one, int(longest)))), "")


def _ropes(config: Config) -> Iterator[Mapping[str, Any]]:
    """The parameters of all layers, or one set for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        nested = [one for one in parameters.values() if isinstance(one, Mapping)]
        yield from nested or [parameters]


def _enough_experts(config: Config) -> str:
    """If the chosen groups of experts have fewer than each token gets, each framework takes others."""
    groups = _whole(config, "n_group", "num_expert_group")
    chosen, experts = _whole(config, "topk_group"), _whole(config, "n_routed_experts", "num_experts")
    count, each = chosen * experts // (groups or 1), _whole(config, "num_experts_per_tok")
    few = groups > 1 and 0 < count < each
    return f"each token has {each} experts, and the groups that are chosen have {count} together" if few else ""


def _whole(config: Config, *names: str) -> int:
    """The first of these that is a whole number; 0 if none is."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


_EVERY: Final = (_decoder_alone, _one_direction, _known_latents, _fixed_ropes, _enough_experts)


def _activation(config: Config, defaults: Config) -> str:
    """mlx-lm has one activation function for each model type, whatever config.json states: the one that transformers
    has by default."""
    for key in ACTIVATIONS:
        if not isinstance(default := getattr(defaults, key, None), str):
            continue
        if (stated := getattr(config, key, default)) is None:
            return f"its config.json has null for {key}, and no framework knows what to compute"
        computed = {activation(default)} | ({GELU, APPROXIMATE_GELU} if config.model_type in SET_RIGHT else set())
        if activation(stated) not in computed:
            return f"mlx-lm ignores {key} = {str(stated)!r}, and computes {default!r}"
    return ""


def activation(name: object) -> str:
    """The one name of an activation function of several that transformers has."""
    return _SAME.get(str(name), str(name))


# One model type


def _always(why: str) -> Callable[[Config], str]:
    return lambda config: why


def _one_expert(config: Config) -> str:
    alone = getattr(config, "num_experts_per_tok", None) == 1 and getattr(config, "norm_topk_prob", False)
    return "mlx-lm ignores norm_topk_prob if each token has one expert, which transformers applies" if alone else ""


def _not_normalised(config: Config) -> str:
    stated = getattr(config, "norm_topk_prob", True)
    return "" if stated else "transformers ignores norm_topk_prob = false, which mlx-lm applies"


def _experts_of_qwen3_vl(config: Config) -> str:
    if config.hidden_size == 2 * config.moe_intermediate_size:
        return (
            "transformers cannot tell the sides of its experts' weights if hidden_size is twice moe_intermediate_size"
        )
    return _not_normalised(config)


def _always_normalised(config: Config) -> str:
    stated = getattr(config, "norm_topk_prob", True)
    return "" if stated else "mlx-lm ignores norm_topk_prob = false, which transformers applies"


def _scaled_attention(config: Config) -> str:
    if getattr(config, "scale_attn_by_inverse_layer_idx", False) or not getattr(config, "scale_attn_weights", True):
        return "mlx-lm ignores how its config.json scales attention"
    return ""


def _without_caps(config: Config) -> str:
    absent = [key for key in RULES["gemma2"][0] if not getattr(config, key, None)]
    return f"mlx-lm cannot compute it without {' and '.join(absent)}" if absent else ""


def _heads_as_wide_as_the_model(config: Config) -> str:
    heads = config.num_attention_heads
    wide = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    fit = wide == config.hidden_size
    return "" if fit else f"its heads have {wide} elements, and mlx-lm computes only as many as hidden_size states"


def _without_attention(config: Config) -> str:
    kinds, given = getattr(config, "layer_types", None), getattr(config, "full_attn_idxs", None)
    none = "full_attention" not in kinds if isinstance(kinds, list) else given == []
    return "none of its layers has attention, without which mlx-lm cannot compute it" if none else ""


def _own_width_of_values(config: Config) -> str:
    width, stated = config.hidden_size // config.num_attention_heads, getattr(config, "v_head_dim", None)
    return "" if stated in (None, width) else f"mlx-lm ignores v_head_dim = {stated}, and has {width}"


def _limited_time_steps(config: Config) -> str:
    low, high = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    limited = low > 0 or high < math.inf
    return "transformers limits its time steps in prompts and not in single tokens" if limited else ""


def _indexers(config: Config) -> str:
    heads, stated = int(config.index_n_heads), getattr(config, "indexer_rope_interleave", None)
    if stated not in (None, config.model_type == "glm_moe_dsa"):
        return f"transformers ignores indexer_rope_interleave = {str(stated).lower()}, which mlx-lm applies"
    if heads < LEAST_HEADS and int(config.index_topk) < int(config.max_position_embeddings):
        return (
            f"its indexers have {heads} heads, so that many tokens have equal scores, of which each framework chooses "
            f"others ({LEAST_HEADS} heads are enough)"
        )
    return ""


_OF_INDEXERS: Final = ("index_n_heads", "index_topk", "max_position_embeddings", "indexer_rope_interleave")
_OF_ATTENTION: Final = ("scale_attn_by_inverse_layer_idx", "scale_attn_weights")

RULES: Final[Mapping[str, Rule]] = {
    "bailing_hybrid": (("norm_topk_prob",), _always_normalised),
    "cohere2": (("hidden_size", "num_attention_heads", "head_dim"), _heads_as_wide_as_the_model),
    "deepseek_v32": (_OF_INDEXERS, _indexers),
    "gemma2": (("attn_logit_softcapping", "final_logit_softcapping"), _without_caps),
    "glm_moe_dsa": (_OF_INDEXERS, _indexers),
    "gpt2": (_OF_ATTENTION, _scaled_attention),
    "gpt_bigcode": (_OF_ATTENTION, _scaled_attention),
    "gptj": (_OF_ATTENTION, _scaled_attention),
    "kimi_linear": (("num_experts_per_tok", "norm_topk_prob"), _one_expert),
    "lfm2": (("layer_types", "full_attn_idxs"), _without_attention),
    "lfm2_moe": (("layer_types", "full_attn_idxs"), _without_attention),
    "longcat_flash": ((), _always("each of its layers keeps latent vectors twice, which are not handed over")),
    "mamba2": (("time_step_limit",), _limited_time_steps),
    "minicpm3": (("hidden_size", "num_attention_heads", "v_head_dim"), _own_width_of_values),
    "minimax": ((), _always("mlx-lm has another model of this name, MiniMax-M2")),
    "minimax_m3_vl_text": (
        (),
        _always("its layers attend to blocks of tokens that an indexer chooses, whose keys are not handed over"),
    ),
    "nanochat": (
        (),
        _always(
            "mlx-lm reads the weights of its authors' program, which have other names and norms than transformers'"
        ),
    ),
    "qwen3_5_moe_text": (("norm_topk_prob",), _not_normalised),
    "qwen3_vl_moe_text": (("norm_topk_prob", "hidden_size", "moe_intermediate_size"), _experts_of_qwen3_vl),
    "recurrent_gemma": ((), _always("transformers keeps the states of one prompt at a time, in the model itself")),
}


# One model type with vLLM


def _chunks_of_vllm(config: Config, device: str, ranks: int) -> str:
    return "what vLLM keeps of layers that attend within chunks of the prompt is not read"


def _neighbours_rotated(config: Config, device: str, ranks: int) -> str:
    halves = getattr(config, "rope_interleave", True) is False
    return "vLLM ignores rope_interleave = false, which transformers applies" if halves else ""


def _norm_with_mean(config: Config, device: str, ranks: int) -> str:
    stated = getattr(config, "rms_norm_eps", None) is not None
    return "its config.json has rms_norm_eps, and vLLM then normalises without the mean" if stated else ""


def _experts_without_bias(config: Config, device: str, ranks: int) -> str:
    return "vLLM chooses experts without their bias on a CPU" if device == "cpu" else ""


def _unnormalised(config: Config, device: str, ranks: int) -> str:
    stated = getattr(config, "norm_topk_prob", False)
    return "vLLM ignores norm_topk_prob, which transformers and mlx-lm apply" if stated else ""


def _biases(config: Config, device: str, ranks: int) -> str:
    """vLLM gives falcon_h1's attention and MLP none, and both projections of a Mamba layer one or none. Several ranks
    answered a tiny model with those of the projections otherwise than one rank, without any hand-off."""
    ignored = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    inner = getattr(config, "mamba_proj_bias", False)
    if getattr(config, "projectors_bias", False) != inner:
        ignored.append("projectors_bias")
    if not ignored and ranks > 1 and inner:
        return "several ranks of vLLM compute the biases of Mamba's projections otherwise than one"
    return f"vLLM ignores {', '.join(ignored)}, which transformers applies" if ignored else ""


def _keys_of_indexers(config: Config, device: str, ranks: int) -> str:
    """On CUDA each key is 8-bit floats with one scale, a power of two, for 128 of them (0.33). Its CPU build computes
    no sparse attention."""
    return "vLLM keeps the keys by which its layers choose tokens in 8 bits, and the decode host needs them unrounded"


def _keys_of_heads(config: Config, device: str, ranks: int) -> str:
    return "vLLM keeps the keys and values of every head, and the decode host needs the latent vectors behind them"


RULES_OF_VLLM: Final[Mapping[str, RuleOfVLLM]] = {
    "cohere": (("rms_norm_eps",), _norm_with_mean),
    "cohere2": (("rms_norm_eps",), _norm_with_mean),
    "deepseek_v3": (("rope_interleave",), _neighbours_rotated),
    "deepseek_v32": ((), _keys_of_indexers),
    "ernie4_5_moe": ((), _experts_without_bias),
    "falcon_h1": (("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), _biases),
    "glm4_moe_lite": (("rope_interleave",), _neighbours_rotated),
    "glm_moe_dsa": ((), _keys_of_indexers),
    "llama4_text": ((), _chunks_of_vllm),
    "minicpm3": ((), _keys_of_heads),
    "olmoe": (("norm_topk_prob",), _unnormalised),
}
