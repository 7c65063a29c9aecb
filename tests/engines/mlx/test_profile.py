"""What is measured from the loaded modules, whatever the config says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from disagg.config import EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.load import load
from disagg.engines.mlx.profile import measure, probe, rope_modules
from disagg.engines.model.architectures.base import LoadedByMLX
from disagg.engines.model.architectures.plain import stated_ropes
from disagg.engines.model.reference import Reference
from disagg.errors import PreflightRefused
from tests.engines.mlx.mlx_parts import Engines
from tests.tiny_models import WINDOW, TinyModel
from tests.values import present

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def theta(base: float, dims: int, over: int | None = None) -> list[float]:
    return [base ** (-i / (over or dims)) for i in range(0, dims, 2)]


@pytest.mark.parametrize("traditional", [False, True])
def test_the_probe_reads_frequencies_of_half_split_and_interleaved_ropes_alike(traditional: bool) -> None:
    rope = probe(nn.RoPE(32, traditional=traditional, base=1e6), 32)

    assert rope is not None
    assert rope.inv_freq == pytest.approx(theta(1e6, 32), rel=1e-5)
    assert rope.scale == pytest.approx(1.0, rel=1e-6)


def test_the_probe_reads_a_partial_rotation_and_a_linear_scaling() -> None:
    rope = probe(nn.RoPE(8, base=1e4, scale=0.25), 32)

    assert rope is not None
    assert rope.inv_freq == pytest.approx([f / 4 for f in theta(1e4, 8)], rel=1e-5)


def test_the_probe_reads_scale_and_frequencies_of_every_scaled_rope() -> None:
    yarn = probe(YarnRoPE(32, base=1.5e5, scaling_factor=32.0), 32)
    long = probe(SuScaledRoPE(16, long_factor=[2.0] * 8, long_mscale=1.2), 16)
    llama3 = probe(Llama3RoPE(16, base=5e5, scaling_config=LLAMA3), 16)
    proportional = probe(ProportionalRoPE(16, 8), 16)

    assert yarn is not None and yarn.scale == pytest.approx(0.1 * np.log(32) + 1, rel=1e-6)
    assert long is not None and long.scale == pytest.approx(1.2, rel=1e-6)
    assert long.inv_freq == pytest.approx([f / 2 for f in theta(1e4, 16)], rel=1e-5)
    assert llama3 is not None and llama3.inv_freq[-1] == pytest.approx(theta(5e5, 16)[-1] / 8, rel=1e-5)
    assert proportional is not None and proportional.inv_freq == pytest.approx(theta(1e4, 8, over=16), rel=1e-5)


def test_a_module_that_turns_nothing_is_no_rope() -> None:
    assert probe(lambda x, offset: x, 16) is None


def test_layer_kinds_come_from_the_caches_the_model_makes(mlx_engine: Engines) -> None:
    layouts = [layer.layout for layer in mlx_engine("gpt_oss").info.profile.layers]

    assert [(x.kind, x.window) for x in layouts] == [("sliding", WINDOW), ("full", None)] * 2
    assert {(x.kv_heads, x.key_dim, x.value_dim) for x in layouts} == {(2, 32, 32)}


@pytest.mark.parametrize("architecture", ["smollm3", "cohere2"])
def test_a_layer_without_rope_has_none_even_where_it_owns_a_rope_module(architecture: str, mlx_engine: Engines) -> None:
    ropes = [layer.rope for layer in mlx_engine(architecture).info.profile.layers]

    assert [rope is None for rope in ropes] == [False, False, False, True]


def test_measuring_leaves_the_model_as_it_was(tiny: TinyModel) -> None:
    model = load(tiny("cohere2"), dtype="float32", device=mx.cpu).model
    before = [type(layer.self_attn.rope) for layer in model.layers]

    measure(model)

    assert [type(layer.self_attn.rope) for layer in model.layers] == before


def test_a_window_that_mlx_lm_ignores_is_refused_by_name_without_the_patch(tiny: TinyModel) -> None:
    with pytest.raises(PreflightRefused, match=f"mlx-lm ignores sliding_window={WINDOW}.*on layers 0-2"):
        MLXDecodeEngine(tiny("mistral_windowed"), 8192, OPTIONS, patches=())


def test_a_window_that_the_context_fits_needs_no_patch(tiny: TinyModel) -> None:
    engine = MLXDecodeEngine(tiny("mistral_windowed"), WINDOW, OPTIONS, patches=())

    assert {layer.kind for layer in engine.info.layout.layers} == {"sliding"}, "as the prefill host names them"
    engine.warm_up()
    engine.close()


def test_gpt_oss_with_untruncated_yarn_is_refused_without_the_patch(tiny: TinyModel) -> None:
    with pytest.raises(PreflightRefused, match=r"mlx-lm turns pair \d+ by .* % off"):
        MLXDecodeEngine(tiny("gpt_oss_yarn"), 8192, OPTIONS, patches=())


def test_the_patch_sets_the_frequencies_and_is_reported(mlx_engine: Engines) -> None:
    info = mlx_engine("gpt_oss_yarn").info

    (rope,) = [finding for finding in info.preflight if finding.component == "rope"]
    assert rope.status == "patched"
    assert "set from the reference" in rope.detail
    assert {finding.status for finding in info.preflight if finding is not rope} == {"ok"}


def test_the_patch_sets_a_scale_that_mlx_lm_ignores(tiny: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("gpt_oss_yarn"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"]["attention_factor"] = 1.5  # transformers applies it, mlx-lm ignores it
    (folder / "config.json").write_text(json.dumps(config))

    engine = MLXDecodeEngine(folder, 8192, OPTIONS)
    assert [present(layer.rope).scale for layer in engine.info.profile.layers] == pytest.approx([1.5] * 4)
    engine.close()


def test_ropes_that_turn_as_the_reference_states_stay_mlx_lms_own(tiny: TinyModel) -> None:
    loaded = load(tiny("llama3"), dtype="float32", device=mx.cpu)
    before = [type(rope) for *_, rope in rope_modules(loaded.model)]
    reference = Reference.open(tiny("llama3"), 8192)
    measured = measure(loaded.model).layers
    ropes = tuple(rope_modules(loaded.model))
    whole = LoadedByMLX(loaded.model, loaded.config, reference.text_config, reference.profile, measured, ropes)

    assert stated_ropes(whole) == []
    assert [type(rope) for *_, rope in rope_modules(loaded.model)] == before
