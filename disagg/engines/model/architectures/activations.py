"""GELU, exact or approximated: mlx-lm has one form for each model type, whatever config.json states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import LoadedByMLX
from disagg.planning.refusals import ACTIVATIONS, APPROXIMATE_GELU, GELU, activation


def stated_gelus(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Compute GELU exactly, or approximate it, as config.json states."""
    from mlx import nn
    from mlx_lm.models import gemma, gpt_bigcode, gpt_neox, starcoder2

    stated = next((activation(value) for key in ACTIVATIONS if (value := getattr(loaded.text_config, key, None))), "")
    exact = ((module.MLP, GELU) for module in (gemma, gpt_bigcode, starcoder2))
    computing = ((gpt_neox.MLP, APPROXIMATE_GELU), *exact)
    blocks = [block for one, computed in computing if stated != computed for block in loaded.modules(one)]
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _with(kind, nn.gelu if stated == GELU else nn.gelu_approx)
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
