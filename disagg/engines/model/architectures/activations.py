"""Activation functions. mlx-lm has one for each model type, whatever config.json states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Config, LoadedByMLX

_KEYS: Final = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act")
_GELU, _APPROXIMATE = "gelu", "gelu_pytorch_tanh"
_SAME: Final[Mapping[str, str]] = {
    "swish": "silu",
    "gelu_python": _GELU,
    "gelu_new": _APPROXIMATE,
    "gelu_fast": _APPROXIMATE,
    "gelu_accurate": _APPROXIMATE,
}
"""transformers' other names of a function."""
_BOTH: Final = ("gemma", "gpt_bigcode", "gpt_neox", "starcoder2")
"""Model types for which `stated_gelus` sets the exact GELU or its approximation."""


def other_activation(config: Config) -> str:
    """Why a model is refused whose config.json states another activation function than mlx-lm computes, which is the
    one that transformers has by default for its type; empty if it does not."""
    for key in _KEYS:
        default, stated = getattr(type(config), key, None), getattr(config, key, None)
        if not isinstance(default, str) or stated is None:
            continue
        computed = {_name(default)} | ({_GELU, _APPROXIMATE} if config.model_type in _BOTH else set())
        if _name(stated) not in computed:
            return f"mlx-lm ignores {key} = {stated!r}, and computes {default!r}"
    return ""


def _name(function: object) -> str:
    return _SAME.get(str(function), str(function))


def stated_gelus(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Compute GELU exactly, or approximate it, as config.json states."""
    from mlx import nn
    from mlx_lm.models import gemma, gpt_bigcode, gpt_neox, starcoder2

    stated = next((_name(value) for key in _KEYS if (value := getattr(loaded.text_config, key, None))), "")
    computing = ((gpt_neox.MLP, _APPROXIMATE), *((module.MLP, _GELU) for module in (gemma, gpt_bigcode, starcoder2)))
    blocks = [block for one, computed in computing if stated != computed for block in loaded.modules(one)]
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _with(kind, nn.gelu if stated == _GELU else nn.gelu_approx)
    detail = f"on {len(blocks)} layers mlx-lm computes another form of GELU than {stated}; set right"
    return [PreflightFinding("activation", "patched", detail)] if blocks else []


@cache
def _with(block_class: Any, function: Callable[[Any], Any]) -> Any:
    class WithStated(block_class):
        def __call__(self, x: Any) -> Any:
            if "gate_proj" in self:
                return self.down_proj(function(self.gate_proj(x)) * self.up_proj(x))
            wider, back = ("c_fc", "c_proj") if "c_fc" in self else ("dense_h_to_4h", "dense_4h_to_h")
            return self[back](function(self[wider](x)))

    return WithStated
