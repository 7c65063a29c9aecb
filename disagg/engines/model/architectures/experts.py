"""Mixtures of experts that a framework does not read, does not normalise, or chooses without their bias."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, LoadedByMLX, LoadedByTransformers, MLXModel

BIASES: Final = ("e_score_correction_bias", "expert_bias")
"""The last names of the biases by which experts are chosen, in both frameworks."""
ROUNDED: Final = ("afmoe", "kimi_linear", "minimax_m2")
"""Model types of which transformers 5.23 rounds these biases to the model's dtype; of all others it does not, nor do
vLLM and mlx-lm of any."""


def with_float_experts(model_class: MLXModel) -> MLXModel:
    """mlx-lm's gpt_oss Model, as a class that also takes float experts; MXFP4 ones are what mlx-lm expects."""

    class GptOss(model_class):
        def sanitize(self, weights: dict[str, Any]) -> Any:
            return super().sanitize(transposed_experts(weights))

    return GptOss


def transposed_experts(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Float gpt_oss experts, [experts, in, out] as transformers saves them, as [experts, out, in] `.weight`s.

    MXFP4 checkpoints name theirs `_blocks` and `_scales`; they are returned unchanged.
    """
    from mlx import core as mx

    suffixes = ("experts.gate_up_proj", "experts.down_proj")
    return {
        f"{name}.weight" if name.endswith(suffixes) else name: mx.contiguous(array.swapaxes(-1, -2))
        if name.endswith(suffixes)
        else array
        for name, array in weights.items()
    }


def with_expert_bias(model_class: MLXModel) -> MLXModel:
    """mlx-lm's ernie4_5_moe Model, as a class that loads the bias with which experts are chosen, which mlx-lm 0.32
    leaves out. `biased_experts` uses it."""
    from mlx import core as mx
    from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP

    class Ernie45Moe(model_class):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            for layer in self.layers:
                if isinstance(layer.mlp, Ernie4_5_MoeMLP):
                    layer.mlp.expert_bias = mx.zeros((args.moe_num_experts,))

        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            bias = "moe_statics.e_score_correction_bias"
            return super().sanitize(
                {
                    name.replace(bias, "expert_bias"): array.reshape(-1) if name.endswith(bias) else array
                    for name, array in weights.items()
                }
            )

    return Ernie45Moe


def with_any_head(model_class: MLXModel) -> MLXModel:
    """mlx-lm's qwen3_vl_moe Model, as a class that also reads a checkpoint whose head is the embeddings."""

    class Qwen3VLMoe(model_class):
        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            if any("lm_head." in name for name in weights):
                return super().sanitize(weights)
            nested = not any(name.startswith("model.") for name in weights)
            head = "language_model.lm_head.weight" if nested else "lm_head.weight"
            embeddings = next(array for name, array in weights.items() if name.endswith("embed_tokens.weight"))
            named = super().sanitize({head: embeddings, **weights})
            return {name: array for name, array in named.items() if "lm_head." not in name}

    return Qwen3VLMoe


ARCHITECTURES = {
    "gpt_oss": Architecture(mlx_model=with_float_experts),
    "ernie4_5_moe": Architecture(float32=("mlp.gate.weight",), mlx_model=with_expert_bias),
    "qwen3_vl_moe": Architecture(mlx_model=with_any_head),
}


def unrounded_biases(loaded: LoadedByTransformers) -> list[PreflightFinding]:
    """Report the biases by which experts are chosen that are float32 in a model of another dtype."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    if loaded.text_config.model_type not in ROUNDED or dtype == "float32":
        return []
    detail = f"transformers rounds the biases by which experts are chosen to {dtype}; float32 here"
    return [PreflightFinding("experts", "patched", detail)]


def biased_experts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Choose the experts of ernie4_5_moe with the checkpoint's bias."""
    from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP

    blocks = [block for block in loaded.modules(Ernie4_5_MoeMLP) if "expert_bias" in block]
    for block in blocks:
        block.__class__ = _experts_with_bias()
    detail = (
        f"on {len(blocks)} layers mlx-lm chooses experts without the checkpoint's e_score_correction_bias; set right"
    )
    return [PreflightFinding("experts", "patched", detail)] if blocks else []


def normalised_experts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Divide the weights of qwen2_moe's chosen experts by their sum if config.json has norm_topk_prob."""
    from mlx_lm.models.qwen2_moe import Qwen2MoeSparseMoeBlock

    blocks = loaded.modules(Qwen2MoeSparseMoeBlock) if getattr(loaded.text_config, "norm_topk_prob", False) else []
    for block in blocks:
        block.__class__ = _normalising_experts()
    detail = f"on {len(blocks)} layers mlx-lm ignores norm_topk_prob; applied"
    return [PreflightFinding("experts", "patched", detail)] if blocks else []


def single_experts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Give the one expert that is chosen the weight 1, if config.json has norm_topk_prob: mlx-lm normalises several
    only, in the gates of its deepseek_v3, glm4_moe, dots1 and others. lfm2_moe's mixture has none, and always does."""
    gates = [
        module
        for module in loaded.model.modules()
        if getattr(module, "top_k", None) == 1
        and getattr(module, "norm_topk_prob", False)
        and hasattr(module, "routed_scaling_factor")
        and "switch_mlp" not in module
    ]
    for gate in gates:
        gate.__class__ = _single_gate(type(gate))
    detail = f"on {len(gates)} layers mlx-lm ignores norm_topk_prob, as each token has one expert; applied"
    return [PreflightFinding("experts", "patched", detail)] if gates else []


def _single_gate(gate_class: Any) -> Any:
    from mlx import core as mx

    class SingleGate(gate_class):
        def __call__(self, *arguments: Any) -> Any:
            chosen, weights = super().__call__(*arguments)
            return chosen, mx.full(weights.shape, self.routed_scaling_factor, weights.dtype)

    return SingleGate


def groups_of_experts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Add to all biases by which experts are chosen the same amount, so that none is below 0, nor the sums that are
    compared. mlx-lm puts 0 in place of those of experts that are not in a chosen group, and would choose such experts.
    The weights of experts do not depend on the biases."""
    from mlx import core as mx

    gates = [gate for gate in loaded.model.modules() if "e_score_correction_bias" in gate and _groups(gate) > 1]
    below = [gate for gate in gates if gate.e_score_correction_bias.min() < 0]
    for gate in below:
        bias = gate.e_score_correction_bias.astype(mx.float32)
        gate.e_score_correction_bias = bias - bias.min()
    detail = f"on {len(below)} layers mlx-lm chooses experts that are in no chosen group; set right"
    return [PreflightFinding("experts", "patched", detail)] if below else []


def _groups(gate: Any) -> int:
    """kimi_linear's stand in the configuration."""
    return int(getattr(gate, "n_group", None) or getattr(getattr(gate, "args", None), "num_expert_group", None) or 1)


def unnormalised_experts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Weigh jamba's chosen experts with their share of all experts, as transformers does, and not of the chosen."""
    from mlx_lm.models.jamba import JambaSparseMoeBlock

    blocks = loaded.modules(JambaSparseMoeBlock)
    for block in blocks:
        block.__class__ = _sharing_experts()
    detail = f"on {len(blocks)} layers mlx-lm normalises the weights of chosen experts; set right"
    return [PreflightFinding("experts", "patched", detail)] if blocks else []


@cache
def _sharing_experts() -> Any:
    from mlx import core as mx
    from mlx_lm.models.jamba import JambaSparseMoeBlock

    class SharingExperts(JambaSparseMoeBlock):
        def __call__(self, x: Any) -> Any:
            count, gates = self.num_experts_per_tok, mx.softmax(self.router(x), axis=-1, precise=True)
            chosen = mx.argpartition(-gates, kth=count - 1, axis=-1)[..., :count]
            weights = mx.take_along_axis(gates, chosen, axis=-1)
            return (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)

    return SharingExperts


@cache
def _normalising_experts() -> Any:
    from mlx import core as mx
    from mlx_lm.models.qwen2_moe import Qwen2MoeSparseMoeBlock

    class NormalisingExperts(Qwen2MoeSparseMoeBlock):
        def __call__(self, x: Any) -> Any:
            gates = mx.softmax(self.gate(x), axis=-1, precise=True)
            chosen = mx.argpartition(-gates, kth=self.top_k - 1, axis=-1)[..., : self.top_k]
            weights = mx.take_along_axis(gates, chosen, axis=-1)
            weights = weights / weights.sum(axis=-1, keepdims=True)
            routed = (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)
            return routed + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

    return NormalisingExperts


@cache
def _experts_with_bias() -> Any:
    from mlx import core as mx
    from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP

    class ExpertsWithBias(Ernie4_5_MoeMLP):
        """The bias decides which experts compute, not with which weight."""

        def __call__(self, x: Any) -> Any:
            gates = self.gate_act(self.gate(x).astype(mx.float32))
            chosen = mx.argpartition(-(gates + self.expert_bias.astype(mx.float32)), kth=self.k - 1, axis=-1)[
                ..., : self.k
            ]
            scores = mx.take_along_axis(gates, chosen, axis=-1)
            scores = scores / mx.maximum(scores.sum(axis=-1, keepdims=True), 1e-12)
            y = (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2).astype(x.dtype)
            return y if self.shared_experts is None else y + self.shared_experts(x)

    return ExpertsWithBias
