"""Mixtures of experts whose weights one framework does not normalise, or chooses without their bias."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, Config, LoadedByMLX, MLXModel


def _unnormalised_experts(config: Config) -> str:
    return "mlx-lm ignores norm_topk_prob, which transformers applies" if config.norm_topk_prob else ""


def _unnormalised_by_vllm(config: Config, device: str) -> str:
    return "vLLM ignores norm_topk_prob, which transformers and mlx-lm apply" if config.norm_topk_prob else ""


def _experts_without_bias(config: Config, device: str) -> str:
    return "vLLM chooses experts without their bias on a CPU" if device == "cpu" else ""


_UNLIKE_ALONE = (
    "bailing_hybrid",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "mimo_v2_flash",
    "nemotron_h",
)


def single_expert(config: Config) -> str:
    """Why a mixture that chooses one expert for a token is refused: transformers divides its weight by itself."""
    alone = getattr(config, "num_experts_per_tok", None) == 1 and getattr(config, "norm_topk_prob", False)
    if not alone or config.model_type not in _UNLIKE_ALONE:
        return ""
    return "mlx-lm ignores norm_topk_prob if num_experts_per_tok is 1, which transformers applies"


def with_expert_bias(model_class: MLXModel) -> MLXModel:
    """mlx-lm's ernie4_5_moe Model, as a class that loads the bias with which experts are chosen, which mlx-lm 0.32
    leaves out."""
    from mlx import core as mx
    from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP

    class Ernie45Moe(model_class):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            for layer in self.layers:
                if isinstance(layer.mlp, Ernie4_5_MoeMLP):
                    layer.mlp.__class__ = _experts_with_bias()
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


ARCHITECTURES = {
    "qwen2_moe": Architecture(refusal=_unnormalised_experts),
    "olmoe": Architecture(refusal_of_vllm=_unnormalised_by_vllm),
    "ernie4_5_moe": Architecture(refusal_of_vllm=_experts_without_bias, mlx_model=with_expert_bias),
}


def biased_experts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Report the experts of ernie4_5_moe, which `with_expert_bias` has made choose with their bias."""
    count = sum(isinstance(module, _experts_with_bias()) for module in loaded.model.modules())
    detail = f"on {count} layers mlx-lm chooses experts without the checkpoint's e_score_correction_bias; set right"
    return [PreflightFinding("experts", "patched", detail)] if count else []


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
