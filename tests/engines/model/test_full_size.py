"""The shipped fleet's models at full size, built without memory: both frameworks and the device model agree on them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from disagg.api.layout import LayerLayout
from disagg.engines.mlx.profile import probe, rope_modules
from disagg.engines.model.architectures.base import LoadedByMLX
from disagg.engines.model.architectures.patches import MLX_PATCHES
from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope, rope_differences
from disagg.engines.model.reference import Reference
from disagg.planning.checkpoint import config_size
from disagg.planning.shapes import ModelShape
from tests import tiny_models
from tests.planning.published_configs import GPT_OSS, GPT_OSS_MLX, QWEN, QWEN_FP8, QWEN_MLX

CONFIGS = {
    "qwen3-coder:30b": QWEN,
    "gpt-oss:120b": {key: value for key, value in GPT_OSS.items() if key != "quantization_config"},
}
CONTEXT = 8192


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of full size, beside the tokenizer of a tiny model."""
    path = tiny_models.make("qwen3_moe", tmp_path_factory.mktemp("full") / "model")
    (path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return path


@pytest.fixture(scope="module")
def sized(folder: Path) -> ModelShape:
    return config_size(json.loads((folder / "config.json").read_text()), "m")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Reference:
    return Reference.open(folder, CONTEXT)


@pytest.fixture(scope="module")
def reference(opened: Reference) -> ModelProfile:
    return opened.profile


@pytest.fixture(scope="module")
def in_torch(folder: Path) -> Any:
    """On torch's meta device, which has shapes and no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.fixture(scope="module")
def in_mlx(folder: Path, opened: Reference, reference: ModelProfile) -> Iterator[Any]:
    """Its arrays are lazy: none of the weights is evaluated."""
    config = json.loads((folder / "config.json").read_text())
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    loaded = LoadedByMLX(model, config, opened.text_config, reference, mlx_layers(model), tuple(rope_modules(model)))
    for patch in MLX_PATCHES:
        patch.apply(loaded)
    yield model
    mx.clear_cache()


def test_weights_are_as_many_in_both_frameworks_and_in_the_device_model(
    in_torch: Any, in_mlx: Any, sized: ModelShape
) -> None:
    counted = sum(tensor.numel() for tensor in in_torch.parameters())
    lazily = sum(math.prod(array.shape) for _, array in tree_flatten(in_mlx.parameters()))
    assert lazily == counted
    assert sized.total_params == pytest.approx(counted, rel=2e-3), "norms, biases and sinks are not counted"


def test_layers_windows_and_kv_bytes_are_the_same_in_both_and_in_the_device_model(
    in_torch: Any, in_mlx: Any, opened: Reference, sized: ModelShape
) -> None:
    layouts = tuple(layer.layout for layer in opened.profile.layers)
    assert tuple(layer.layout for layer in torch_layers(in_torch)) == layouts
    assert tuple(layer.layout for layer in mlx_layers(in_mlx)) == layouts
    for tokens in (1, 127, 129, CONTEXT):
        nbytes = opened.layout("bfloat16").nbytes(tokens)
        assert sized.layout("bfloat16").nbytes(tokens) == nbytes


def test_rotary_frequencies_are_those_that_the_fingerprint_is_made_of(
    in_torch: Any, in_mlx: Any, reference: ModelProfile
) -> None:
    for layers, name in ((torch_layers(in_torch), "transformers"), (mlx_layers(in_mlx), "mlx-lm")):
        for layer, wanted in zip(layers, reference.layers, strict=True):
            assert wanted.rope is not None and layer.rope is not None
            assert [*rope_differences(wanted.rope, layer.rope, "checkpoint", name)] == []


def test_other_forms_of_the_weights_have_the_same_fingerprint(folder: Path, opened: Reference) -> None:
    plain = (folder / "config.json").read_text()
    of_mlx = GPT_OSS_MLX if opened.profile.architecture == "gpt_oss" else QWEN_MLX
    of_vllm = GPT_OSS if opened.profile.architecture == "gpt_oss" else QWEN_FP8
    try:
        for config in (of_mlx, of_vllm):
            (folder / "config.json").write_text(json.dumps(config))
            assert Reference.open(folder, CONTEXT).fingerprint == opened.fingerprint
    finally:
        (folder / "config.json").write_text(plain)


def torch_layers(model: Any) -> tuple[LayerProfile, ...]:
    """From the modules' shapes, the cache's windows, and the rotary module, made once more with memory."""
    config = model.config
    rotary = type(model.model.rotary_emb)(config=config)
    rope = Rope(tuple(float(f) for f in rotary.inv_freq.double()), float(rotary.attention_scaling))
    heads = model.model.layers[0].self_attn.k_proj.out_features // config.head_dim
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    return tuple(LayerProfile(_layout(heads, config.head_dim, window), rope) for window in windows)


def mlx_layers(model: Any) -> tuple[LayerProfile, ...]:
    caches = make_prompt_cache(model)
    ropes = {layer: (parent, module) for layer, parent, _, module in rope_modules(model)}
    layers = []
    for index, cache in enumerate(caches):
        attention, rope = ropes[index]
        dim = attention.head_dim if hasattr(attention, "head_dim") else attention.k_norm.weight.shape[0]
        heads = attention.k_proj.weight.shape[0] // dim
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        layers.append(LayerProfile(_layout(heads, dim, window), probe(rope, dim)))
    return tuple(layers)


def _layout(heads: int, dim: int, window: int | None) -> LayerLayout:
    return LayerLayout("full" if window is None else "sliding", heads, dim, dim, window=window)
