"""Patches: corrections of known differences between a loaded mlx-lm model and its checkpoint's reference.

A patch applies only to the difference it was written for; the preflight refuses a model with any other. After a patch
the model is measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.models.ssm import ssm_update

from disagg.api.status import PreflightFinding
from disagg.engines.mlx.profile import rope_modules
from disagg.engines.model.preflight import rope_differences
from disagg.engines.model.profile import LayerProfile, ModelProfile

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
    """Tell nemotron_h's Mamba layers how long each of several prompts is.

    mlx-lm 0.32 reads prompts of different lengths side by side, the shorter ones padded at their end. Its nemotron_h
    does not pass the lengths on, as its other models with Mamba layers do, and forgets the states of the shorter ones.
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


class _MixerWithLengths(NemotronHMamba2Mixer):  # type: ignore[misc]
    """mlx-lm's own, which leaves `lengths` out."""

    def _ssm(self, hidden_states: Any, B: Any, C: Any, dt: Any, cache: Any, mask: Any) -> Any:  # noqa: PLR0917
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


PATCHES: tuple[Patch, ...] = (untruncated_yarn, lengths_of_mamba)
