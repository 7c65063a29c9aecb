"""Windows, rotary embeddings and epsilons that a checkpoint's configuration states and a framework does not compute, of
any model; and queries that vLLM does not scale.

Which side is right follows from the configuration: the reference has what it states (`profile.ModelProfile`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import LoadedByMLX, LoadedByTransformers, ReadByVLLM, layer_kinds
from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope, rope_differences
from disagg.planning.refusals import rope_type


def scaled_queries(read: ReadByVLLM) -> list[PreflightFinding]:
    """State by how much ministral3 multiplies the queries of far tokens where vLLM 0.32 reads it: not among the
    parameters of the rotary embedding, where config.json has it."""
    parameters = getattr(read.text_config, "rope_parameters", None) or {}
    beta, original = (parameters.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if read.text_config.model_type != "ministral3" or not beta or not original:
        return []
    read.overrides["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": original}
    return [PreflightFinding("queries", "patched", f"vLLM does not scale queries after {original} tokens; set right")]


def stated_ropes(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Put a rotary module with the reference's frequencies in place of each that turns otherwise, or of each on a layer
    that does not rotate. Which coordinates form a pair stays as the model has it.

    mlx-lm 0.32 always rounds the ends of YaRN's ramp to whole pairs, for one. The gpt-oss checkpoints do not: one of
    their frequencies is off by 43 %, and after 6,000 tokens only 38 % of the likeliest tokens agree.
    """
    if len(loaded.measured) != len(loaded.reference.layers):
        return []
    numbers = _numbers(loaded.text_config)
    counts: Counter[str] = Counter()
    for layer, parent, name, rope in loaded.ropes:
        number = numbers.get(layer, len(loaded.measured))
        if number >= len(loaded.measured) or loaded.measured[number].rope is None:
            continue
        want, have = loaded.reference.layers[number].rope, loaded.measured[number].rope
        if differences := list(rope_differences(want, have, loaded.reference.source, "mlx-lm")):
            parent[name] = _rotation(want, traditional=bool(getattr(rope, "traditional", False)))
            counts.update(differences)
    return [
        PreflightFinding("rope", "patched", f"on {count} layers {what}; set from the reference")
        for what, count in counts.items()
    ]


def untruncated_ropes(loaded: LoadedByTransformers) -> list[PreflightFinding]:
    """Set the frequencies of a YaRN with `truncate: false` that is stated for one kind of layers: transformers 5.23
    reads this key only if it is stated for all."""
    config, kinds = loaded.text_config, layer_kinds(loaded.text_config)
    found = []
    for kind, parameters in (getattr(config, "rope_parameters", None) or {}).items():
        if kind not in kinds or rope_type(parameters) != "yarn" or parameters.get("truncate", True):
            continue
        if (rope := architecture_of(config).rope(config, kinds.index(kind), kind)) is not None:
            frequencies = getattr(loaded.model.get_decoder().rotary_emb, f"{kind}_inv_freq")
            frequencies.copy_(frequencies.new_tensor(rope.inv_freq))
            detail = f"on layers of {kind} transformers ignores truncate = false; set from the reference"
            found.append(PreflightFinding("rope", "patched", detail))
    return found


def _numbers(config: Any) -> dict[int, int]:
    """Of each layer of the model the number of its profile: of one that reads what an earlier layer keeps, that of the
    last such layer of its kind, which rotates alike."""
    places, kinds = architecture_of(config).places(config), layer_kinds(config)
    numbers = {layer: number for number, layer in enumerate(places) if places.count(layer) == 1}
    last = {kinds[layer]: number for layer, number in numbers.items()}
    return {layer: last[kind] for layer, kind in enumerate(kinds) if layer not in places and kind in last} | numbers


def stated_windows(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Give layers the windows that mlx-lm leaves out. Each layer of such a model then makes its mask from its own
    cache: the model makes one for all."""
    reference, measured = loaded.reference, loaded.measured
    places = architecture_of(loaded.text_config).places(loaded.text_config)[: len(reference.layers)]
    layers = list(loaded.model.layers)
    if len(measured) != len(places) or len(layers) != int(loaded.text_config.num_hidden_layers):
        return []
    windows = {
        number: stated
        for number, (want, have) in enumerate(zip(reference.layers, measured, strict=True))
        if {want.layout.kind, have.layout.kind} <= {"full", "sliding"} and not have.layout.states
        if (stated := _window(want, reference)) != _window(have, reference)
    }
    if not windows or not all(_takes_mask(layer) for layer in layers):
        return []
    for number, place in enumerate(places):
        if not measured[number].layout.states:  # such a layer reads another kind of mask
            window = windows.get(number, _window(measured[number], reference))
            layers[place].__class__ = _masked(type(layers[place]), window)
    loaded.model.__class__ = _windowed(type(loaded.model), windows)
    return [
        PreflightFinding("layer kinds", "patched", f"on {count} layers mlx-lm {_ignored(window)}")
        for window, count in Counter(windows.values()).items()
    ]


def _ignored(window: int | None) -> str:
    if window is None:
        return "applies a window that the checkpoint does not set; taken away"
    return f"ignores sliding_window={window}, which the checkpoint sets; applied"


def _window(layer: LayerProfile, reference: ModelProfile) -> int | None:
    """The tokens that a layer attends to; None: all within the context."""
    window = layer.layout.window
    return window if layer.layout.kind == "sliding" and window and window < reference.context else None


def _rotation(rope: Rope | None, *, traditional: bool) -> Any:
    """A module that rotates like this; None: it does not rotate."""
    from mlx import core as mx
    from mlx import nn

    class StatedRope(nn.Module):
        """In place of mlx-lm's rotary module."""

        def __init__(self) -> None:
            super().__init__()
            self.traditional = traditional
            self._scale = 1.0 if rope is None else rope.scale
            self._freqs = mx.array([1.0 / f if f else float("inf") for f in rope.inv_freq]) if rope else None

        def __call__(self, x: Any, offset: Any = 0) -> Any:
            if self._freqs is None:
                return x
            width = 2 * self._freqs.size
            if self._scale != 1.0:
                x = x.at[..., :width].multiply(self._scale)
            return mx.fast.rope(
                x, width, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
            )

    made = StatedRope()
    if made._freqs is not None:
        mx.eval(made._freqs)
    return made


def _takes_mask(layer: Any) -> bool:
    return {"mask", "cache"} <= inspect.signature(type(layer).__call__).parameters.keys()


def _masked(layer_class: Any, window: int | None) -> Any:
    """A class of layers that make their mask from their own cache. window: tokens; None: all."""
    from mlx_lm.models.base import create_attention_mask

    names = inspect.signature(layer_class.__call__)

    class MaskedLayer(layer_class):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            given = names.bind(self, *arguments, **options)
            hidden = given.args[1]
            as_array = not isinstance(given.arguments.get("mask"), str)
            given.arguments["mask"] = create_attention_mask(
                hidden, given.arguments.get("cache"), window_size=window, return_array=as_array
            )
            return super().__call__(*given.args[1:], **given.kwargs)

    return MaskedLayer


def _windowed(model_class: Any, windows: Mapping[int, int | None]) -> Any:
    """A class of models whose caches with these numbers keep so many of the last tokens. None: all."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    class WindowedModel(model_class):
        def make_cache(self) -> list[Any]:
            made = super().make_cache() if hasattr(super(), "make_cache") else [KVCache() for _ in self.layers]
            for number, window in windows.items():
                made[number] = KVCache() if window is None else RotatingKVCache(window)
            return list(made)

    return WindowedModel


_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


def stated_epsilon(loaded: LoadedByTransformers) -> list[PreflightFinding]:
    """Normalise with the epsilon of config.json, as mlx-lm and vLLM do. transformers 5.23 has 1e-6 for the latent
    vectors of glm4_moe_lite and bailing_hybrid, and does not read mimo_v2_flash's layernorm_epsilon."""
    config, modules = loaded.text_config, list(loaded.model.modules())
    if config.model_type in ("glm4_moe_lite", "bailing_hybrid"):
        norms = [norm for part in modules for name in _LATENT_NORMS if (norm := getattr(part, name, None)) is not None]
        key = "rms_norm_eps"
    elif config.model_type == "mimo_v2_flash" and hasattr(config, "layernorm_epsilon"):
        norms, key = [part for part in modules if hasattr(part, "variance_epsilon")], "layernorm_epsilon"
    else:
        return []
    stated = float(getattr(config, key))
    wrong = [norm for norm in norms if norm.variance_epsilon != stated]
    for norm in wrong:
        norm.variance_epsilon = stated
    detail = f"{len(wrong)} norms in transformers ignore {key}; applied"
    return [PreflightFinding("norms", "patched", detail)] if wrong else []
