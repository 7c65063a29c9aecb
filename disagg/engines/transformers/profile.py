"""Measure what a loaded transformers model computes: cache shapes, windows, states, rotary embedding.

One token is run at two positions. Attention over a single token does not depend on its position, so every layer gets
the same input both times, and the layers whose keys differ (of latent attention: whose rotated vectors differ) are
those that rotate them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from disagg.api.layout import LayerLayout, StateTensor
from disagg.engines.model.architectures import Architecture, architecture_of
from disagg.engines.model.architectures.base import layer_kinds
from disagg.engines.model.architectures.weights import tied_in_transformers
from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope, cannot_compute
from disagg.engines.transformers.load import decoder_layers
from disagg.errors import ModelError

_PROBE_POSITION = 3  # turns the fastest pair by several degrees in any rope, and is exact in every dtype


def measure(model: Any, reference: ModelProfile) -> ModelProfile:
    """The model's actual profile, of as many layers as `reference` has. Tokenizer and context, which transformers does
    not change, are `reference`'s."""
    config = model.config.get_text_config(decoder=True)
    places = sorted(set(architecture_of(config).places(config)[: len(reference.layers)]))
    try:
        here, there = _layers_at(model, 0), _layers_at(model, _PROBE_POSITION)
        layers = tuple(one for index in places for one in _profiles(model, index, here[index], there[index]))
    except ModelError:
        raise
    except Exception as error:  # which one depends on the architecture
        raise cannot_compute("transformers", error) from error
    return replace(
        reference,
        source="transformers",
        architecture=str(config.model_type),
        vocab_size=int(model.get_input_embeddings().num_embeddings),
        layers=layers,
        tied=tied_in_transformers(model),
    )


def _layers_at(model: Any, position: int) -> list[Any]:
    """The layers of transformers' own cache after one token at `position`."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    ids = torch.tensor([[config.vocab_size // 2]], device=model.device)
    positions = torch.full_like(ids, position)
    with torch.inference_mode():
        name = architecture_of(config).cache_argument
        model.base_model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache})
    return list(cache.layers)


def _profiles(model: Any, index: int, here: Any, there: Any) -> Iterator[LayerProfile]:
    """What one layer of the model keeps, by what its cache holds after a token at either position."""
    yield _profile(model, index, here, there)
    keys, moved = (getattr(layer, "indexer_keys", None) for layer in (here, there))
    if keys is not None and moved is not None:
        rope = _module_rope(model, index) if _turned(keys, moved) else None
        yield LayerProfile(LayerLayout("index", 1, int(keys.shape[-1])), rope)


def _profile(model: Any, index: int, here: Any, there: Any) -> LayerProfile:
    """Its rows and its state."""
    config = model.config.get_text_config(decoder=True)
    states = _states(architecture_of(config), here)
    if not isinstance(here, DynamicLayer):
        return LayerProfile(LayerLayout("state", states=states), None)
    if here.keys is None:
        raise ModelError(
            f"model type {config.model_type!r} keeps nothing in layer {index}",
            "this architecture cannot be handed over",
        )
    chunked = layer_kinds(config)[index] == "chunked_attention"  # of which all rows are kept here
    window = None if chunked else getattr(here, "sliding_window", None)
    layout = LayerLayout(
        "full" if window is None else "sliding",
        int(here.keys.shape[1]),
        int(here.keys.shape[3]),
        int(here.values.shape[3]),
        window,
        states,
    )
    learned = hasattr(model.get_decoder(), "wpe")  # a vector of each position, which is in every layer's input
    turned = not learned and (_turned(here.keys, there.keys) or _turned(here.values, there.values))
    return LayerProfile(layout, _module_rope(model, index) if turned else None)


def _states(architecture: Architecture, layer: Any) -> tuple[StateTensor, ...]:
    """The tensors of a layer's state as they are on the wire; none if it has no state."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    convolutions = [state for state in layer.conv_states.values() if state is not None]
    recurrent = [state for state in layer.recurrent_states.values() if state is not None]
    tensors = architecture.wire_states(convolutions, recurrent)
    return tuple(StateTensor(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)


def _turned(rows: torch.Tensor, moved: torch.Tensor) -> bool:
    """Whether rows were rotated. Rotation changes them by about their own size, kernels without a fixed order of sums
    by far less."""
    return bool((rows - moved).abs().max() > 0.01 * rows.abs().max())


def _module_rope(model: Any, layer: int) -> Rope | None:
    """The frequencies and scale in the module that this layer's rotation comes from."""
    decoder = model.get_decoder()
    module = getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    prefixes = ["", f"{kinds[layer]}_"] if kinds else [""]
    for prefix in prefixes:
        frequencies = getattr(module, f"{prefix}inv_freq", None)
        if frequencies is not None:
            scale = getattr(module, f"{prefix}attention_scaling")
            if config.model_type == "phimoe":  # its module applies this one in place of what it keeps
                scale = (config.rope_parameters or {}).get("short_mscale") or scale
            return Rope(tuple(float(f) for f in frequencies.double().cpu()), float(scale))
    table = getattr(getattr(decoder_layers(model)[layer], "attn", None), "embed_positions", None)
    if table is not None:  # [positions, sines and cosines]
        sines, cosines = table[1].double().cpu().chunk(2)
        return Rope(tuple(torch.atan2(sines, cosines).tolist()))
    raise ModelError(
        f"model type {config.model_type!r}: the frequencies of its rotary module cannot be found",
        "this architecture cannot be handed over",
    )
