"""What vLLM computes otherwise than transformers and mlx-lm, of models that it loads and whose layers measure right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from disagg.engines.model.architectures.base import Config


def refusal(config: Config, device: str) -> str:
    """Why vLLM on this device ("cpu", "cuda") is refused for such a model; empty if it is not."""
    why = _REFUSALS.get(str(config.model_type))
    return why(config, device) if why is not None else ""


def _other_norm(config: Config, device: str) -> str:
    stated = getattr(config, "rms_norm_eps", None) is not None
    return "its config.json has rms_norm_eps, and vLLM then normalises without the mean" if stated else ""


def _unnormalised_experts(config: Config, device: str) -> str:
    return "vLLM ignores norm_topk_prob, which transformers and mlx-lm apply" if config.norm_topk_prob else ""


def _experts_without_bias(config: Config, device: str) -> str:
    return "vLLM chooses experts without their bias on a CPU" if device == "cpu" else ""


_REFUSALS: Final[Mapping[str, Callable[[Config, str], str]]] = {
    "cohere": _other_norm,
    "cohere2": _other_norm,
    "ernie4_5_moe": _experts_without_bias,
    "olmoe": _unnormalised_experts,
}
