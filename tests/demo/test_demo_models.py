"""The demo checkpoints are real: both frameworks load them, agree on them, and the text reads like code."""

from __future__ import annotations

import cmd
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import torch
from mlx_lm.models import gpt_oss
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

MODELS = Path(__file__).parents[2] / "disagg" / "demo" / "models"
QWEN, GPT_OSS = MODELS / "qwen3-moe-tiny", MODELS / "gpt-oss-tiny"
BOTH = pytest.mark.parametrize("path", [QWEN, GPT_OSS], ids=lambda path: path.name)
SOURCE = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_two_checkpoints_together_stay_under_8_megabytes() -> None:
    assert (QWEN / "model.safetensors").is_file()
    assert (GPT_OSS / "model.safetensors").is_file()
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) < 8_000_000


@BOTH
def test_config_has_the_flat_keys_of_hub_checkpoints(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    assert "rope_parameters" not in config
    assert config["rope_theta"] == {QWEN: 1_000_000, GPT_OSS: 150_000}[path]
    if path == GPT_OSS:
        assert config["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }


@BOTH
def test_the_tokenizer_keeps_every_byte_and_fills_the_vocabulary(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    text = SOURCE + "naïve → 数\t\r\n\x00  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == config["vocab_size"]
    stops = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|endoftext|>", "<|im_end|>"]


@BOTH
def test_chat_turns_are_single_marker_tokens_in_both_frameworks(path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    peer = mlx_lm.utils.load_tokenizer(path)
    assert peer.apply_chat_template(chat, add_generation_prompt=True) == ids


@BOTH
def test_both_frameworks_compute_the_same_logits(path: Path) -> None:
    reference, other = torch_model(path), mlx_model(path)
    if path == GPT_OSS:
        mend_rope(other, reference)
    ids = prompt_ids(path, 300)
    assert largest_difference(reference, other, ids) < 1e-3


def test_stock_mlx_lm_differs_on_gpt_oss_until_its_rope_is_mended() -> None:
    """mlx-lm ignores YaRN's `truncate: false`: served so, it drifts with length."""
    reference, other = torch_model(GPT_OSS), mlx_model(GPT_OSS)
    ids = prompt_ids(GPT_OSS, 500)
    assert largest_difference(reference, other, ids) > 0.1
    mend_rope(other, reference)
    assert largest_difference(reference, other, ids) < 1e-3


def test_stock_mlx_lm_loads_qwen_but_not_float_gpt_oss() -> None:
    mlx_lm.load(str(QWEN))
    with pytest.raises(ValueError, match="not in model"):
        mlx_lm.load(str(GPT_OSS))


@BOTH
def test_greedy_text_after_a_long_prompt_is_varied_and_reads_like_code(path: Path) -> None:
    """From many prompts of a line or two these models repeat themselves; after a page of source, less."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), torch_model(path)
    source = Path(cmd.__file__).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer.encode(source)[:300]])
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64)[0, ids.shape[1] :]
    assert len(new) == 64
    assert len(set(new.tolist())) >= 15
    assert "\n    " in tokenizer.decode(new)


def torch_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def mlx_model(path: Path) -> Any:
    """The model in float32: MLX's CPU expert matmul has no other type."""
    if path == GPT_OSS:
        model, _ = load_model(path, get_model_classes=lambda config: (FloatGptOss, gpt_oss.ModelArgs))
    else:
        model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return model


class FloatGptOss(gpt_oss.Model):
    """mlx-lm's gpt_oss, which expects MXFP4 experts, reading float experts as transformers stores them."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        adapted = dict(as_mlx_expert(name, value) for name, value in weights.items())
        sanitized: dict[str, mx.array] = super().sanitize(adapted)
        return sanitized


def as_mlx_expert(name: str, value: mx.array) -> tuple[str, mx.array]:
    """[experts, in, out] becomes [experts, out, in] and gets the `.weight` suffix; all else is left alone."""
    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return f"{name}.weight", value.swapaxes(-1, -2)
    return name, value


def mend_rope(model: Any, reference: PreTrainedModel) -> None:
    wavelengths = mx.array(1 / reference.model.rotary_emb.inv_freq.numpy())
    for layer in model.layers:
        layer.self_attn.rope._freqs = wavelengths


def prompt_ids(path: Path, count: int) -> list[int]:
    ids = AutoTokenizer.from_pretrained(path).encode(SOURCE)
    assert len(ids) >= count
    return list(ids[:count])


def largest_difference(reference: PreTrainedModel, other: Any, ids: list[int]) -> float:
    with torch.inference_mode():
        ours = reference(torch.tensor([ids])).logits[0].numpy()
    return float(np.abs(ours - np.array(other(mx.array([ids]))[0])).max())
