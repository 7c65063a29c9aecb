"""One tiny model in both engines, and its answers with and without a hand-off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from disagg.config import DType, EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.kv.received import ReceivedKV
from tests import tiny_models
from tests.engines.architectures.configs.rewrite import (
    add_part_that_reads_images,
    add_unused_projections,
    drop_tied_head,
    fuse_experts,
    name_outputs,
    put_into_multimodal,
    split_convolutions,
    transpose_experts,
)
from tests.engines.architectures.handoff import hand_over

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: TransformersPrefillEngine
    decode: MLXDecodeEngine

    def kv(self, tokens: Sequence[int], **options: Any) -> ReceivedKV:
        """The KV of a prompt without its last token, handed over."""
        return hand_over(self.prefill, self.decode, tokens[:-1], **options)

    def greedy(self, tokens: Sequence[int], answer: Sequence[int]) -> list[int]:
        """What transformers alone answers, as long as it agrees with `answer`: one pass over both."""
        logits = self.prefill.logits([*tokens, *answer[:-1]], len(answer))
        return [int(token) for token in logits.argmax(-1)]

    def difference(self, tokens: Sequence[int], answer: Sequence[int]) -> float:
        """The largest difference of log-probabilities along an answer, handed over against transformers alone."""
        whole, last = [*tokens, *answer[:-1]], len(answer)
        ours = self.decode.logits(whole, last, hand_over(self.prefill, self.decode, whole[:-last]))
        theirs = self.prefill.logits(whole, last)
        ours, theirs = (torch.log_softmax(torch.tensor(rows), -1) for rows in (ours, theirs))
        return float((ours - theirs).abs().max())


def make(config: Mapping[str, Any], folder: Path) -> None:
    """A new checkpoint with this config.json, in the form of the hub's."""
    torch.set_num_threads(1)
    if has_other_parts(config):
        _make_text(config["text_config"], folder)
        put_into_multimodal(config, folder)
        if "vision_config" in config:
            add_part_that_reads_images(folder)
        if config["model_type"] == "gemma3n":
            add_unused_projections(config, folder)
        if config["model_type"] == "qwen3_vl_moe":
            transpose_experts(folder)
        return
    _make_text(config, folder)
    if config["model_type"] == "qwen3_5_moe":
        fuse_experts(folder)
    if config["model_type"] == "bailing_hybrid":
        name_outputs(folder)
    if config["model_type"] == "olmo_hybrid":
        split_convolutions(folder)


def has_other_parts(config: Mapping[str, Any]) -> bool:
    """Whether it is of a checkpoint that has more than a part that reads text."""
    return "text_config" in config and not config.get("architectures", [""])[0].endswith("ForCausalLM")


def _make_text(config: Mapping[str, Any], folder: Path) -> None:
    tiny_models.make_from(config, folder)
    if config.get("tie_word_embeddings"):
        drop_tied_head(folder)


@contextmanager
def running(config: Mapping[str, Any], folder: Path, *, dtype: DType = "float32") -> Iterator[Pair]:
    """Both engines on a new checkpoint with this config.json, with chunks of 48 tokens."""
    make(config, folder)
    with loaded(folder, dtype=dtype) as pair:
        yield pair


@contextmanager
def loaded(folder: Path, *, dtype: DType = "float32", device: str = "cpu", context: int = CONTEXT) -> Iterator[Pair]:
    """Both engines on the checkpoint in this folder. device: of transformers; MLX computes on the CPU."""
    options = EngineOptions("transformers", dtype=dtype, device=device, chunk_tokens=48)
    prefill = TransformersPrefillEngine(folder, context, options)
    decode = MLXDecodeEngine(folder, context, replace(options, name="mlx", device="cpu"))
    try:
        yield Pair(prefill, decode)
    finally:
        decode.close()
