"""Mamba and Mamba 2: a convolution and a recurrent state, alone in a layer or beside attention.

Recurrent states are float32 whatever the model's dtype.
"""

from __future__ import annotations

import inspect
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
    LoadedByTransformers,
    MLXModel,
    Tensor,
    convolution_rows,
    convolution_window,
    full,
    no_rope,
    plain_rope,
)
from disagg.engines.model.profile import MODEL_DTYPE, Rope


def nemotron_mamba(config: Config) -> LayerLayout:
    """nemotron_h: Mamba 2."""
    return _mamba(
        config.conv_kernel, config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    )


def granite_mamba(config: Config) -> LayerLayout:
    """granitemoehybrid: Mamba 2."""
    heads, dim = config.mamba_n_heads, config.mamba_d_head
    return _mamba(config.mamba_d_conv, heads, dim, config.mamba_n_groups, config.mamba_d_state)


def mamba2(config: Config) -> LayerLayout:
    """mamba2: Mamba 2 in every layer."""
    return _mamba(config.conv_kernel, config.num_heads, config.head_dim, config.n_groups, config.state_size)


def mamba1(config: Config) -> LayerLayout:
    """mamba, falcon_mamba: a state per channel, in every layer."""
    return _mamba1(config.conv_kernel, config.intermediate_size, config.state_size)


def jamba_mamba(config: Config) -> LayerLayout:
    """jamba: a state per channel."""
    return _mamba1(config.mamba_d_conv, config.mamba_expand * config.hidden_size, config.mamba_d_state)


def falcon_hybrid(config: Config) -> LayerLayout:
    """falcon_h1: attention and Mamba 2 side by side in one layer."""
    return replace(full(config), states=granite_mamba(config).states)


def nemotron_parts(config: Config) -> Convolved:
    """The values, and what they are written and read with."""
    return _parts(config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)


def granite_parts(config: Config) -> Convolved:
    """As of nemotron_h."""
    return _parts(config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)


def mamba2_parts(config: Config) -> Convolved:
    """As of nemotron_h."""
    return _parts(config.num_heads, config.head_dim, config.n_groups, config.state_size)


def mamba_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return convolution_rows(convolutions[0]), recurrent[0]


def _mamba(kernel: int, heads: int, dim: int, groups: int, state: int) -> LayerLayout:
    window = convolution_window(kernel, heads * dim + 2 * groups * state)
    return LayerLayout("state", states=(window, StateTensor((heads, dim, state), "float32")))


def _parts(heads: int, dim: int, groups: int, state: int) -> Convolved:
    values, keys = (int(heads), int(dim)), (int(groups), int(state))
    return Convolved((values, keys, keys), value=0, key=1)


def mamba1_parts(config: Config) -> Convolved:
    """All channels."""
    return Convolved(((int(config.intermediate_size), 1),), key=None)


def jamba_parts(config: Config) -> Convolved:
    """As of mamba."""
    return Convolved(((int(config.mamba_expand * config.hidden_size), 1),), key=None)


def _mamba1(kernel: int, channels: int, state: int) -> LayerLayout:
    """transformers and mlx-lm keep its state in the dtype of the model."""
    matrix = StateTensor((int(channels), int(state)), MODEL_DTYPE)
    return LayerLayout("state", states=(convolution_window(kernel, channels), matrix))


def _rope_if_stated(config: Any, layer: int, kind: str) -> Rope | None:
    return plain_rope(config, layer, kind) if config.position_embedding_type == "rope" else None


def with_multipliers(model_class: MLXModel) -> MLXModel:
    """mlx-lm's falcon_h1 Model, as a class that multiplies keys, values and biases, too, with what config.json states.
    mlx-lm 0.32 multiplies the other weights, when it reads a checkpoint in the form of transformers."""

    class FalconH1(model_class):
        def sanitize(self, weights: dict[str, Any]) -> Any:
            kernel = weights["model.layers.0.mamba.conv1d.weight"]
            if kernel.shape[-1] > kernel.shape[1]:
                factors = self._left_out()
                ends = {name: ".".join(name.split(".")[-2:]) for name in weights}
                weights = {name: array * factors.get(ends[name], 1) for name, array in weights.items()}
            return super().sanitize(weights)

        def _left_out(self) -> dict[str, Any]:
            """By the end of a weight's name."""
            args = self.args
            return {
                "k_proj.weight": args.key_multiplier,
                "v_proj.weight": args.attention_in_multiplier,
                "k_proj.bias": args.key_multiplier,
                "o_proj.bias": args.attention_out_multiplier,
                "in_proj.bias": self.model._mup_vector,
                "out_proj.bias": args.ssm_out_multiplier,
                "gate_proj.bias": args.mlp_multipliers[0],
                "down_proj.bias": args.mlp_multipliers[1],
            }

    return FalconH1


_MAMBA1 = Architecture(
    kinds={"linear_attention": mamba1},
    rope=no_rope,
    wire_states=mamba_states,
    convolved=mamba1_parts,
    cache_argument="cache_params",
)

ARCHITECTURES = {
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "mamba2": replace(_MAMBA1, kinds={"linear_attention": mamba2}, convolved=mamba2_parts),
    "jamba": Architecture(
        kinds={"linear_attention": jamba_mamba}, rope=no_rope, wire_states=mamba_states, convolved=jamba_parts
    ),
    "nemotron_h": Architecture(
        kinds={"linear_attention": nemotron_mamba},
        rope=no_rope,
        wire_states=mamba_states,
        convolved=nemotron_parts,
    ),
    "falcon_h1": Architecture(
        kinds={"hybrid": falcon_hybrid},
        wire_states=mamba_states,
        convolved=granite_parts,
        mlx_model=with_multipliers,
    ),
    "granitemoehybrid": Architecture(
        kinds={"linear_attention": granite_mamba},
        rope=_rope_if_stated,
        wire_states=mamba_states,
        convolved=granite_parts,
    ),
}


def lengths_of_mamba(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Pass the length of each of several prompts to nemotron_h's Mamba layers.

    mlx-lm 0.32 reads prompts of different lengths side by side, the shorter ones padded at their end. Its nemotron_h
    does not pass the lengths on, as its other models with Mamba layers do, and loses the states of the shorter ones.
    """
    from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer

    mixers = loaded.modules(NemotronHMamba2Mixer)
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


def states_of_shorter_prompts(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Read prompts of different lengths one after another in layers that mlx-lm 0.32 does not tell the lengths: they
    would read the padding behind the shorter ones."""
    from mlx_lm.models import jamba, mamba, olmo_hybrid

    count = 0
    for kind in (mamba.MambaBlock, jamba.JambaMambaMixer, olmo_hybrid.GatedDeltaNet):
        patched, blocks = _one_after_another(kind), loaded.modules(kind)
        for block in blocks:
            block.__class__ = patched
        count += len(blocks)
    detail = f"on {count} layers mlx-lm forgets the state of a prompt that it reads beside a longer one; set right"
    return [PreflightFinding("states", "patched", detail)] if count else []


def _one_after_another(block_class: Any) -> Any:
    from mlx import core as mx
    from mlx_lm.models.cache import ArraysCache

    names = inspect.signature(block_class.__call__)

    class OneAfterAnother(block_class):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            given = names.bind(self, *arguments, **options)
            x = given.args[1]
            cache: Any = given.arguments.get("cache")
            lengths = None if cache is None or cache.lengths is None else cache.lengths.tolist()
            if lengths is None or min(lengths) >= x.shape[1]:
                made = super().__call__(*given.args[1:], **given.kwargs)
                if lengths is not None and cache.lengths.tolist() == lengths:  # some count them, others do not
                    cache.advance(x.shape[1])
                return made
            rows, kept = [], []
            for row, length in enumerate(lengths):
                own = ArraysCache(len(cache.cache))
                own.cache = [None if array is None else array[row : row + 1] for array in cache.cache]
                read = min(max(length, 0), x.shape[1])
                one = x[row : row + 1, :read]
                if "mask" in given.arguments:
                    given.arguments["mask"] = None
                given.arguments.update({"x": one, "cache": own})
                made = super().__call__(*given.args[1:], **given.kwargs) if read else one
                rows.append(mx.pad(made, [(0, 0), (0, x.shape[1] - read), (0, 0)]))
                kept.append(own.cache)
            cache.cache = [mx.concatenate(list(arrays)) for arrays in zip(*kept, strict=True)]
            cache.advance(x.shape[1])
            return mx.concatenate(rows)

    return OneAfterAnother


def stated_epsilons(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Give the norms of mamba, falcon_mamba and mamba2 the epsilon of config.json. mlx-lm 0.32 has 1e-5."""
    from mlx import nn
    from mlx_lm.models import mamba, mamba2

    backbones = [*loaded.modules(mamba.Mamba), *loaded.modules(mamba2.Mamba2)]
    norms = [norm for one in backbones for norm in (one.norm_f, *(layer.norm for layer in one.layers))]
    wrong = [norm for norm in norms if isinstance(norm, nn.RMSNorm) and norm.eps != _epsilon(loaded)]
    for norm in wrong:
        norm.eps = _epsilon(loaded)
    detail = f"{len(wrong)} norms of mlx-lm ignore layer_norm_epsilon; applied"
    return [PreflightFinding("norms", "patched", detail)] if wrong else []


def _epsilon(loaded: LoadedByMLX) -> float:
    return float(loaded.text_config.layer_norm_epsilon)


def states_of_earlier_chunks(loaded: LoadedByTransformers) -> list[PreflightFinding]:
    """Begin each chunk of a prompt with the state after the one before. transformers 5.23 begins the scan of Mamba's
    states with zeros whenever it reads several tokens, as its kernel does."""
    from transformers.models.falcon_mamba import modeling_falcon_mamba
    from transformers.models.jamba import modeling_jamba
    from transformers.models.mamba import modeling_mamba

    count = 0
    for module, kind in (
        (modeling_mamba, modeling_mamba.MambaMixer),
        (modeling_falcon_mamba, modeling_falcon_mamba.FalconMambaMixer),
        (modeling_jamba, modeling_jamba.JambaMambaMixer),
    ):
        patched, mixers = _mixer_with_state(kind, module), [m for m in loaded.model.modules() if type(m) is kind]
        for mixer in mixers:
            mixer.__class__ = patched
        count += len(mixers)
    detail = f"on {count} layers transformers forgets the state after each chunk of a prompt; set right"
    return [PreflightFinding("states", "patched", detail)] if count else []


def _mixer_with_state(mixer_class: Any, module: Any) -> Any:
    import torch

    class MixerWithState(mixer_class):
        def forward(self, hidden_states: Any, cache_params: Any = None, *arguments: Any, **options: Any) -> Any:
            state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
            if state is None or hidden_states.shape[1] == 1:
                return super().forward(hidden_states, cache_params, *arguments, **options)
            scan = module.mamba_selective_scan

            def scan_from_state(u: Any, dt: Any, A: Any, B: Any, C: Any, **given: Any) -> Any:
                made, last = scan(u, dt, A, B, C, **given)
                steps = torch.nn.functional.softplus(dt + given["delta_bias"][..., None]).float()
                decay = torch.exp(A[None, :, None] * steps.cumsum(-1)[..., None]) * state.float()[:, :, None]
                more = torch.einsum("bdln,bnl->bdl", decay, C.float()).to(made.dtype)
                return made + more * torch.nn.functional.silu(given["z"]), last + decay[:, :, -1].to(last.dtype)

            module.mamba_selective_scan = scan_from_state
            try:
                return super().forward(hidden_states, cache_params, *arguments, **options)
            finally:
                module.mamba_selective_scan = scan

    return MixerWithState


def grouped_norms(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Normalise each group of a Mamba layer's channels by itself, as transformers does."""
    from mlx_lm.models.falcon_h1 import FalconH1Mixer
    from mlx_lm.models.granitemoehybrid import GraniteMoeHybridMamba2Mixer
    from mlx_lm.models.mamba2 import Mamba2Block

    kinds = (FalconH1Mixer, GraniteMoeHybridMamba2Mixer, Mamba2Block)
    several = [mixer for one in kinds for mixer in loaded.modules(one)]
    mixers = [mixer for mixer in several if mixer.n_groups > 1 and "norm" in mixer]
    for mixer in mixers:
        kind: Any = type(mixer.norm)
        mixer.norm.__class__ = _norm_of_groups(kind, mixer.n_groups)
    if not mixers:
        return []
    detail = f"on {len(mixers)} layers mlx-lm normalises {mixers[0].n_groups} groups of channels together; set right"
    return [PreflightFinding("norms", "patched", detail)]


@cache
def _norm_of_groups(norm_class: Any, groups: int) -> Any:
    from mlx import core as mx
    from mlx_lm.models.activations import swiglu

    class NormOfGroups(norm_class):
        def __call__(self, hidden_states: Any, gate: Any = None) -> Any:
            first = getattr(self, "norm_before_gate", False)
            epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
            if gate is not None and not first:
                hidden_states = swiglu(gate, hidden_states)
            normalised = mx.fast.rms_norm(mx.unflatten(hidden_states, -1, (groups, -1)), None, epsilon)
            hidden_states = self.weight * normalised.flatten(-2)
            return swiglu(gate, hidden_states) if gate is not None and first else hidden_states

    return NormOfGroups


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
