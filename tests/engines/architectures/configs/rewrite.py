"""A checkpoint of text, as transformers writes it, rewritten in the form of the hub's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_json

PREFIXES: Mapping[str, str] = {
    "gemma3": "language_model.model.",
    "gemma4": "model.language_model.",
    "gemma3n": "model.language_model.",
    "mistral3": "language_model.model.",
    "qwen2_vl": "model.",
    "qwen2_5_vl": "model.",
    "qwen3_vl": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
}
"""Of the weights of the text part in a multimodal checkpoint, if transformers does not build that part alone."""


def put_into_multimodal(config: Mapping[str, Any], folder: Path) -> None:
    """Rewrite a checkpoint of text as the text part of a multimodal one that has this config.json."""
    prefix = PREFIXES.get(config["model_type"], "language_model.model.")
    head = "" if prefix.startswith("model.") else prefix.removesuffix("model.")
    weights = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def drop_tied_head(folder: Path) -> None:
    """Remove the head from a checkpoint whose head is the embeddings: some of transformers' classes write one."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.endswith("lm_head.weight")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def add_part_that_reads_images(folder: Path) -> None:
    """Give a multimodal checkpoint of which only the text part has weights those of all others, at random."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    whole = folder / "whole"
    model.save_pretrained(whole)
    weights = load_file(whole / "model.safetensors")
    others = {
        name: weight for name, weight in weights.items() if "language_model" not in name and "lm_head" not in name
    }
    assert others, "transformers has the text part only"
    save_file(load_file(folder / "model.safetensors") | others, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(whole)


def fuse_experts(folder: Path) -> None:
    """Rewrite a checkpoint whose experts transformers stored one by one as the hub's are: one tensor per layer."""
    weights = load_file(folder / "model.safetensors")
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        parts = {
            part: [
                weights.pop(f"{layer}.experts.{expert}.{part}_proj.weight")
                for expert in range(
                    sum(n.startswith(f"{layer}.experts.") and n.endswith(f"{part}_proj.weight") for n in weights)
                )
            ]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        weights[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        weights[f"{layer}.experts.down_proj"] = torch.stack(parts["down"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def transpose_experts(folder: Path) -> None:
    """Rewrite a checkpoint with one tensor of experts per layer as the hub's of qwen3_vl_moe: inputs before outputs."""
    weights = {
        name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_unused_projections(config: Mapping[str, Any], folder: Path) -> None:
    """Give the layers that share keys and values the projections that the hub's gemma3n has there. None is used."""
    text = config["text_config"]
    width, count = text["num_key_value_heads"] * text["head_dim"], text["num_hidden_layers"]
    weights = load_file(folder / "model.safetensors")
    for layer in range(count - text["num_kv_shared_layers"], count):
        attention = f"{PREFIXES['gemma3n']}layers.{layer}.self_attn"
        for part in ("k_proj", "v_proj"):
            weights[f"{attention}.{part}.weight"] = torch.ones(width, text["hidden_size"])
        weights[f"{attention}.k_norm.weight"] = torch.ones(text["head_dim"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def name_outputs(folder: Path) -> None:
    """Give the outputs of bailing_hybrid's delta nets the hub's name: transformers writes that of attention."""
    weights = load_file(folder / "model.safetensors")
    nets = {name.removesuffix("f_proj.weight") for name in weights if name.endswith(".f_proj.weight")}
    named = {
        f"{name.removesuffix('dense.weight')}o_proj.weight" if name.removesuffix("dense.weight") in nets else name: one
        for name, one in weights.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def split_convolutions(folder: Path) -> None:
    """Give each of olmo_hybrid's three convolutions the channels of its projection: transformers writes thirds."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(".q_conv1d.weight")]:
        net = name.removesuffix("q_conv1d.weight")
        widths = [weights[f"{net}{part}_proj.weight"].shape[0] for part in "qkv"]
        whole = torch.cat([weights[f"{net}{part}_conv1d.weight"] for part in "qkv"])
        for part, one in zip("qkv", whole.split(widths), strict=True):
            weights[f"{net}{part}_conv1d.weight"] = one.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
