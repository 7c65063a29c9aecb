"""Mamba 2: a convolution and a recurrent state per head, alone in a layer or beside attention.

Recurrent states are float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from disagg.api.layout import LayerLayout, StateTensor
from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    Convolved,
    LoadedByMLX,
    Tensor,
    convolution_rows,
    convolution_window,
    full,
    layer_kinds,
    no_rope,
    plain_rope,
)
from disagg.engines.model.profile import Rope


def nemotron_mamba(config: Config) -> LayerLayout:
    """nemotron_h: Mamba 2."""
    return _mamba(
        config.conv_kernel, config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    )


def granite_mamba(config: Config) -> LayerLayout:
    """granitemoehybrid: Mamba 2."""
    heads, dim = config.mamba_n_heads, config.mamba_d_head
    return _mamba(config.mamba_d_conv, heads, dim, config.mamba_n_groups, config.mamba_d_state)


def falcon_hybrid(config: Config) -> LayerLayout:
    """falcon_h1: attention and Mamba 2 side by side in one layer."""
    return replace(full(config), states=granite_mamba(config).states)


def nemotron_parts(config: Config) -> Convolved:
    """The values, and what they are written and read with."""
    return _parts(config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)


def granite_parts(config: Config) -> Convolved:
    """As of nemotron_h."""
    return _parts(config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)


def mamba_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return convolution_rows(convolutions[0]), recurrent[0]


def _mamba(kernel: int, heads: int, dim: int, groups: int, state: int) -> LayerLayout:
    window = convolution_window(kernel, heads * dim + 2 * groups * state)
    return LayerLayout("state", states=(window, StateTensor((heads, dim, state), "float32")))


def _parts(heads: int, dim: int, groups: int, state: int) -> Convolved:
    values, keys = (int(heads), int(dim)), (int(groups), int(state))
    return Convolved((values, keys, keys), value=0, key=1)


def _rope_if_stated(config: Any, layer: int, kind: str) -> Rope | None:
    return plain_rope(config, layer, kind) if config.position_embedding_type == "rope" else None


def _grouped_norm(config: Any) -> str:
    several = "linear_attention" in layer_kinds(config) and config.mamba_n_groups > 1
    return "mlx-lm normalises all groups of a Mamba layer together, transformers each" if several else ""


ARCHITECTURES = {
    "nemotron_h": Architecture(
        kinds={"linear_attention": nemotron_mamba},
        rope=no_rope,
        wire_states=mamba_states,
        convolved=nemotron_parts,
    ),
    "falcon_h1": Architecture(kinds={"hybrid": falcon_hybrid}, wire_states=mamba_states, convolved=granite_parts),
    "granitemoehybrid": Architecture(
        kinds={"linear_attention": granite_mamba},
        rope=_rope_if_stated,
        wire_states=mamba_states,
        convolved=granite_parts,
        refusal=_grouped_norm,
    ),
}


def lengths_of_mamba(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Pass the length of each of several prompts to nemotron_h's Mamba layers.

    mlx-lm 0.32 reads prompts of different lengths side by side, the shorter ones padded at their end. Its nemotron_h
    does not pass the lengths on, as its other models with Mamba layers do, and loses the states of the shorter ones.
    """
    from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer

    mixers = [module for module in loaded.model.modules() if type(module) is NemotronHMamba2Mixer]
    for mixer in mixers:
        mixer.__class__ = _mixer_with_lengths()
    if not mixers:
        return []
    detail = (
        f"on {len(mixers)} layers mlx-lm forgets the state of a prompt that it reads beside a longer one; set right"
    )
    return [PreflightFinding("states", "patched", detail)]


def unlimited_time_steps(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Take away granitemoehybrid's limits on time steps, unless config.json states some.

    mlx-lm 0.32 limits them to between 0.001 and 100 by default, transformers to what the checkpoint states, else not.
    """
    from mlx_lm.models.granitemoehybrid import GraniteMoeHybridMamba2Mixer

    mixers = [module for module in loaded.model.modules() if isinstance(module, GraniteMoeHybridMamba2Mixer)]
    if not mixers or loaded.config.get("time_step_limit") is not None:
        return []
    for mixer in mixers:
        mixer.time_step_limit = (0.0, float("inf"))
    detail = f"on {len(mixers)} layers mlx-lm limits time steps to 0.001 at least, the checkpoint does not; set right"
    return [PreflightFinding("time steps", "patched", detail)]


@cache
def _mixer_with_lengths() -> Any:
    from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
    from mlx_lm.models.ssm import ssm_update

    class MixerWithLengths(NemotronHMamba2Mixer):
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

    return MixerWithLengths
