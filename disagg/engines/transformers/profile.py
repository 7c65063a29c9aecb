"""Measure what a loaded transformers model computes: cache shapes, windows, rotary embedding.

One token is run at two positions. Attention over a single token does not depend on its position, so every layer gets
the same input both times, and the layers whose keys differ are those that rotate them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope
from disagg.errors import ModelError
from disagg.kv.layout import LayerLayout

_PROBE_POSITION = 3  # turns the fastest pair by several degrees in any rope, and is exact in every dtype


def measure(model: Any, reference: ModelProfile) -> ModelProfile:
    """The model's actual profile. Tokenizer and context, which transformers does not change, are `reference`'s."""
    here, there = _keys_at(model, 0), _keys_at(model, _PROBE_POSITION)
    windows = _windows(model.config)
    if not len(here) == len(windows) == model.config.num_hidden_layers:
        raise ModelError(
            f"model type {model.config.model_type!r} caches {len(here)} layers of {model.config.num_hidden_layers}",
            "this architecture cannot be handed over",
        )
    layers = tuple(
        LayerProfile(
            _layer_layout(keys, values, window),
            _module_rope(model, index) if _turned(keys, moved[0]) else None,
        )
        for index, ((keys, values), moved, window) in enumerate(zip(here, there, windows, strict=True))
    )
    return replace(
        reference,
        source="transformers",
        architecture=str(model.config.model_type),
        vocab_size=int(model.get_input_embeddings().num_embeddings),
        layers=layers,
    )


def _keys_at(model: Any, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer for one token at `position`."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([[model.config.vocab_size // 2]], device=model.device)
    positions = torch.full_like(ids, position)
    with torch.inference_mode():
        model.base_model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _turned(keys: torch.Tensor, moved: torch.Tensor) -> bool:
    """Whether keys were rotated. Rotation changes them by about their own size, kernels without a fixed order of sums
    by far less."""
    return bool((keys - moved).abs().max() > 0.01 * keys.abs().max())


def _windows(config: Any) -> list[int | None]:
    """The window of each layer, as transformers builds its own cache and masks."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]


def _layer_layout(keys: torch.Tensor, values: torch.Tensor, window: int | None) -> LayerLayout:
    kind = "full" if window is None else "sliding"
    return LayerLayout(kind, int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), window=window)  # type: ignore[arg-type]


def _module_rope(model: Any, layer: int) -> Rope | None:
    """The frequencies and scale in the module that this layer's rotation comes from."""
    module = getattr(model.base_model, "rotary_emb", None)
    kinds = getattr(model.config, "layer_types", None) or []
    prefixes = ["", f"{kinds[layer]}_"] if kinds else [""]
    for prefix in prefixes:
        frequencies = getattr(module, f"{prefix}inv_freq", None)
        if frequencies is not None:
            return Rope(
                tuple(float(f) for f in frequencies.double().cpu()),
                float(getattr(module, f"{prefix}attention_scaling")),
            )
    raise ModelError(
        f"model type {model.config.model_type!r}: the frequencies of its rotary module cannot be found",
        "this architecture cannot be handed over",
    )
