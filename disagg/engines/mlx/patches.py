"""Patches: corrections of known differences between a loaded mlx-lm model and its checkpoint's reference.

A patch applies only to the difference it was written for; the preflight refuses a model with any other. After a patch
the model is measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP
from mlx_lm.models.granitemoehybrid import GraniteMoeHybridMamba2Mixer
from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.models.ssm import ssm_update

from disagg.api.status import PreflightFinding
from disagg.engines.mlx.profile import rope_modules
from disagg.engines.model.profile import LayerProfile, ModelProfile, rope_differences

# (model, config, reference, measured layers) -> one finding per correction made
Patch = Callable[[Any, Mapping[str, Any], ModelProfile, Sequence[LayerProfile]], list[PreflightFinding]]


def untruncated_yarn(
    model: Any, config: Mapping[str, Any], reference: ModelProfile, measured: Sequence[LayerProfile]
) -> list[PreflightFinding]:
    """Set the frequencies of YaRN ropes from the reference if the checkpoint has `truncate: false`.

    mlx-lm 0.32 always rounds the ends of YaRN's ramp to whole pairs. The gpt-oss checkpoints do not: one of their
    frequencies is off by 43 % in unpatched mlx-lm, and after 6,000 tokens only 38 % of the top-1 tokens agree.
    """
    scaling = config.get("rope_scaling") or {}
    if scaling.get("truncate") is not False or len(measured) != len(reference.layers):
        return []
    layers_by_difference: dict[str, int] = {}
    for index, _, _, rope in rope_modules(model):
        want, have = reference.layers[index].rope, measured[index].rope
        if not isinstance(rope, YarnRoPE) or want is None or rope._freqs.shape != (len(want.inv_freq),):
            continue
        for difference in rope_differences(want, have, reference.source, "mlx-lm"):
            layers_by_difference[difference] = layers_by_difference.get(difference, 0) + 1
            rope._freqs = 1.0 / mx.array(want.inv_freq, dtype=mx.float32)
            mx.eval(rope._freqs)
    return [
        PreflightFinding(
            "rope", "patched", f"on {count} layers {what}: it ignores YaRN's truncate: false; set from the reference"
        )
        for what, count in layers_by_difference.items()
    ]


def lengths_of_mamba(
    model: Any, config: Mapping[str, Any], reference: ModelProfile, measured: Sequence[LayerProfile]
) -> list[PreflightFinding]:
    """Pass the length of each of several prompts to nemotron_h's Mamba layers.

    mlx-lm 0.32 reads prompts of different lengths side by side, the shorter ones padded at their end. Its nemotron_h
    does not pass the lengths on, as its other models with Mamba layers do, and loses the states of the shorter ones.
    """
    mixers = [module for module in model.modules() if type(module) is NemotronHMamba2Mixer]
    for mixer in mixers:
        mixer.__class__ = _MixerWithLengths
    if not mixers:
        return []
    detail = (
        f"on {len(mixers)} layers mlx-lm forgets the state of a prompt that it reads beside a longer one; set right"
    )
    return [PreflightFinding("states", "patched", detail)]


def unlimited_time_steps(
    model: Any, config: Mapping[str, Any], reference: ModelProfile, measured: Sequence[LayerProfile]
) -> list[PreflightFinding]:
    """Take away granitemoehybrid's limits on time steps, unless config.json states some.

    mlx-lm 0.32 limits them to between 0.001 and 100 by default, transformers to what the checkpoint states, else not.
    """
    mixers = [module for module in model.modules() if isinstance(module, GraniteMoeHybridMamba2Mixer)]
    if not mixers or config.get("time_step_limit") is not None:
        return []
    for mixer in mixers:
        mixer.time_step_limit = (0.0, float("inf"))
    detail = f"on {len(mixers)} layers mlx-lm limits time steps to 0.001 at least, the checkpoint does not; set right"
    return [PreflightFinding("time steps", "patched", detail)]


def biased_experts(
    model: Any, config: Mapping[str, Any], reference: ModelProfile, measured: Sequence[LayerProfile]
) -> list[PreflightFinding]:
    """Report the experts of ernie4_5_moe, which `with_expert_bias` has made choose with their bias."""
    count = sum(isinstance(module, _ExpertsWithBias) for module in model.modules())
    detail = f"on {count} layers mlx-lm chooses experts without the checkpoint's e_score_correction_bias; set right"
    return [PreflightFinding("experts", "patched", detail)] if count else []


def with_expert_bias(model_class: Any) -> Any:
    """mlx-lm's ernie4_5_moe Model, as a class that loads the bias with which experts are chosen, which mlx-lm 0.32
    leaves out."""

    class Ernie45Moe(model_class):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            for layer in self.layers:
                if isinstance(layer.mlp, Ernie4_5_MoeMLP):
                    layer.mlp.__class__ = _ExpertsWithBias
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


class _ExpertsWithBias(Ernie4_5_MoeMLP):
    """The bias decides which experts compute, not with which weight."""

    def __call__(self, x: Any) -> Any:
        gates = self.gate_act(self.gate(x).astype(mx.float32))
        chosen = mx.argpartition(-(gates + self.expert_bias.astype(mx.float32)), kth=self.k - 1, axis=-1)[..., : self.k]
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        scores = scores / mx.maximum(scores.sum(axis=-1, keepdims=True), 1e-12)
        y = (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2).astype(x.dtype)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class _MixerWithLengths(NemotronHMamba2Mixer):
    """mlx-lm's own, which leaves `lengths` out."""

    def _ssm(self, hidden_states: Any, B: Any, C: Any, dt: Any, cache: Any, mask: Any) -> Any:  # noqa: PLR0917 - as mlx-lm calls it
        batch, tokens, _ = hidden_states.shape
        y, state = ssm_update(
            hidden_states.reshape(batch, tokens, self.num_heads, self.head_dim),
            self.A_log,
            B.reshape(batch, tokens, self.n_groups, self.ssm_state_size),
            C.reshape(batch, tokens, self.n_groups, self.ssm_state_size),
            self.D.astype(hidden_states.dtype),
            dt,
            self.dt_bias,
            cache[1] if cache else None,
            self.time_step_limit,
            mask,
            cache.lengths if cache else None,
        )
        if cache:
            cache[1] = state
        return y.reshape(batch, tokens, self.intermediate_size)


PATCHES: tuple[Patch, ...] = (untruncated_yarn, lengths_of_mamba, unlimited_time_steps, biased_experts)
