"""Rotary frequencies from a checkpoint's parameters, in pure Python: the reference for both frameworks.

Frequencies must be fixed: keys computed with those for a short prompt are wrong for a long one, and cannot be handed
over. `dynamic` changes them beyond max_position_embeddings, and no longer context is served. `longrope` does so beyond
original_max_position_embeddings, and is supported if its two sets are equal or the context is no longer
(`refusals.for_context`).

`parameters` has the keys of transformers' `rope_parameters`: rope_type, rope_theta, factor, partial_rotary_factor, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from disagg.engines.model.profile import Rope
from disagg.errors import ModelError
from disagg.planning.refusals import refusal_of_rope, rope_type

Parameters = Mapping[str, Any]
MAX_DIM: Final = 65_536


def reference_rope(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """The rotary embedding that the parameters describe. ModelError for a type whose frequencies are not fixed."""
    kind = rope_type(parameters)
    if reason := refusal_of_rope(parameters, max_positions):
        hint = f"use a model whose rope type is one of {', '.join(sorted(_FORMULAS))}"
        raise ModelError(f"config.json: {reason}", hint)
    dim = head_dim if kind == "proportional" else int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    if dim > MAX_DIM:
        raise ModelError(f"config.json: heads of {dim} elements", "compare config.json with the model's original")
    try:
        return _FORMULAS[kind](parameters, dim, max_positions)
    except KeyError as missing:
        raise ModelError(
            f"rope type {kind!r} in config.json: {missing} is missing", "compare config.json with the model's original"
        ) from missing


def _default(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    theta = float(parameters["rope_theta"])
    return Rope(tuple(theta ** (-i / dim) for i in range(0, dim, 2)))


def _dynamic(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    """The default one, as far as a prompt is no longer than max_positions. alpha: hunyuan's, which always applies."""
    stretched = float(parameters["rope_theta"]) * float(parameters.get("alpha") or 1.0) ** (dim / (dim - 2))
    return _default({**parameters, "rope_theta": stretched}, dim, max_positions)


def _proportional(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    """The first pairs of the whole head turn, as many as partial_rotary_factor states; the others do not."""
    factor = float(parameters.get("factor") or 1.0)
    turning = int((parameters.get("partial_rotary_factor") or 1.0) * dim // 2)
    frequencies = _default(parameters, dim, max_positions).inv_freq
    return Rope(tuple(f / factor if pair < turning else 0.0 for pair, f in enumerate(frequencies)))


def _linear(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    factor = float(parameters["factor"])
    return Rope(tuple(f / factor for f in _default(parameters, dim, max_positions).inv_freq))


def _llama3(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    """Slow frequencies are divided by `factor`, fast ones unchanged. Those between are interpolated by their number of
    turns over the original context."""
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters.get("original_max_position_embeddings") or max_positions)

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        if turns > high:
            return frequency
        if turns < low:
            return frequency / factor
        blend = (turns - low) / (high - low)
        return (1 - blend) * frequency / factor + blend * frequency

    return Rope(tuple(scaled(f) for f in _default(parameters, dim, max_positions).inv_freq))


def _yarn(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    """Fast pairs are unchanged, slow ones divided by `factor`, with a linear ramp over the pair index between them."""
    original = float(parameters.get("original_max_position_embeddings") or max_positions)
    factor = float(parameters.get("factor") or max_positions / original)
    low, high = _yarn_ramp(parameters, dim, original)

    def scaled(pair: int, frequency: float) -> float:
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        return frequency / factor * ramp + frequency * (1 - ramp)

    base = _default(parameters, dim, max_positions).inv_freq
    return Rope(tuple(scaled(i, f) for i, f in enumerate(base)), _yarn_scale(parameters, factor))


def _yarn_ramp(parameters: Parameters, dim: int, original: float) -> tuple[float, float]:
    theta = float(parameters["rope_theta"])

    def pair_turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(float(parameters.get("beta_fast") or 32.0))
    high = pair_turning(float(parameters.get("beta_slow") or 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return (low, high + 0.001) if low == high else (low, high)  # no division by zero


def _yarn_scale(parameters: Parameters, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    both = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if both[0] and both[1]:
        return mscale(float(both[0])) / mscale(float(both[1]))
    return mscale(1.0)


def _longrope(parameters: Parameters, dim: int, max_positions: int) -> Rope:
    """Each frequency is divided by a factor of its own. short_mscale: phimoe's scale."""
    original = float(parameters["original_max_position_embeddings"])
    short = parameters["short_factor"]
    factor = float(parameters.get("factor") or max_positions / original)
    scale = parameters.get("short_mscale", parameters.get("attention_factor"))
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    base = _default(parameters, dim, max_positions).inv_freq
    return Rope(tuple(f / float(by) for f, by in zip(base, short, strict=True)), float(scale))


_FORMULAS: Mapping[str, Callable[[Parameters, int, int], Rope]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
