"""disagg/engines/transformers/load.py: what cannot be loaded ends in one clear ModelError."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.config import DType, EngineOptions
from disagg.engines.transformers.load import choose_device, load_model, quantization, weight_bytes
from disagg.errors import ModelError
from tests import tiny_models
from tests.tiny_models import TinyModel

CPU = torch.device("cpu")
OPTIONS = EngineOptions("transformers", dtype="float32", device="cpu")


@pytest.fixture
def copy(tiny: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "m"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_loaded_in_the_wanted_dtype(tiny: TinyModel, dtype: DType) -> None:
    model = load_model(tiny("llama"), replace(OPTIONS, dtype=dtype), CPU)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert not model.training


def test_float32_is_float32_on_a_gpu_also_in_convolutions(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load_model(tiny("llama"), OPTIONS, CPU)
    assert not torch.backends.cudnn.allow_tf32


def test_the_attention_implementation_is_the_one_asked_for(tiny: TinyModel) -> None:
    assert load_model(tiny("llama"), replace(OPTIONS, attention="eager"), CPU).config._attn_implementation == "eager"


def test_an_unknown_attention_implementation_is_refused(tiny: TinyModel) -> None:
    with pytest.raises(ModelError, match="transformers cannot load it"):
        load_model(tiny("llama"), replace(OPTIONS, attention="telepathy"), CPU)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    rewrite(copy, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"1 missing or of another shape, model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copy, OPTIONS, CPU)


def test_a_tensor_of_another_shape_is_refused(copy: Path) -> None:
    rewrite(copy, **{"model.norm.weight": torch.ones(63)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight|mismatch|shape"):
        load_model(copy, OPTIONS, CPU)


def test_corrupt_weights_are_refused(copy: Path) -> None:
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[8:40] = b"\xff" * 32
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=str(copy)):
        load_model(copy, OPTIONS, CPU)


def test_an_out_of_memory_error_has_a_hint(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", exhausted)
    with pytest.raises(ModelError, match=r"does not fit on cpu.*quantize it"):
        load_model(tiny("llama"), OPTIONS, CPU)


@pytest.mark.parametrize("name", ["cuda:9", "tpu9", "nonsense"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"device '{name}' cannot be used"):
        choose_device(name)


def test_auto_finds_a_device() -> None:
    assert choose_device("auto").type in ("cuda", "mps", "cpu")
    assert choose_device("cpu") == CPU


def test_quantization_without_its_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(ModelError, match="needs torchao"):
        quantization("int8")


def test_a_hub_checkpoint_with_mxfp4_experts_loads_as_the_weights_it_stands_for(
    tiny: TinyModel, tmp_path: Path
) -> None:
    packed, floats = (shutil.copytree(tiny("gpt_oss"), tmp_path / name) for name in ("packed", "floats"))
    save_file(tiny_models.pack_mxfp4(packed), floats / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(5, 105)[None]
    with torch.inference_mode():
        got, want, original = (load_model(p, OPTIONS, CPU)(ids).logits for p in (packed, floats, tiny("gpt_oss")))
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, original, atol=0.1)


def test_tied_models_lack_nothing(tiny: TinyModel) -> None:
    assert json.loads((tiny("qwen3") / "config.json").read_text())["tie_word_embeddings"]
    model = load_model(tiny("qwen3"), OPTIONS, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shared_weights_are_counted_once(tiny: TinyModel) -> None:
    stored = sum(t.nbytes for t in load_file(tiny("qwen3") / "model.safetensors").values())
    model = load_model(tiny("qwen3"), OPTIONS, CPU)
    frequencies = sum(buffer.nbytes for buffer in model.buffers())
    assert weight_bytes(model) == stored + frequencies
    assert stored > 10 * frequencies


def test_a_multimodal_model_without_a_class_for_its_text_part_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.engines.transformers.load.MODEL_MAPPING", {})
    text = json.loads((copy / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    (copy / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
    with pytest.raises(ModelError, match="no class for the text part of model type 'qwen3_vl' alone"):
        load_model(copy, OPTIONS, CPU)
