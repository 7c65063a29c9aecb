"""disagg/engines/mlx/span.py: a model that mlx-lm cannot compute in parts is found out when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from disagg.config import EngineOptions
from disagg.engines.mlx import span
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.load import LoadedModel, prepare
from disagg.engines.mlx.span import Spans, with_layers
from disagg.engines.model.architectures.patches import MLX_PATCHES
from disagg.engines.model.reference import EngineInfo
from disagg.errors import ModelError
from tests.engines.architectures import pairs
from tests.engines.architectures.configs import config
from tests.tiny_models import TinyModel

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


def loaded(folder: Path) -> tuple[LoadedModel, EngineInfo]:
    model, info, _ = prepare(folder, OPTIONS, context=2048, device=mx.cpu, patches=MLX_PATCHES)
    return model, replace(info, split=replace(info.split, refusal=""))


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "gemma3_text", "cohere2", "qwen3_moe"])
def test_a_model_whose_layers_pass_on_one_array_is_divided(
    model: str, mlx_engine: Callable[[str], MLXDecodeEngine]
) -> None:
    assert mlx_engine(model).info.split.refusal == ""


def test_layers_that_pass_on_more_than_one_array_are_named(tmp_path: Path) -> None:
    pairs.make(config("gemma3n"), tmp_path)
    model, info = loaded(tmp_path)
    assert "a layer passes on an array of shape (4, 1, 13, 64) for 13 tokens" in Spans(model.model, info).split.refusal


def test_a_head_and_a_tail_that_give_something_else_are_refused(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, info = loaded(tiny("llama"))
    honest = span.Span.run
    assert Spans(model.model, info).split.refusal == ""

    def late(self: span.Span, tokens: list[int], caches: list[Any], hidden: Any = None) -> Any:
        return honest(self, tokens, caches, None if hidden is None else hidden * 1.01)

    monkeypatch.setattr(span.Span, "run", late)
    refusal = Spans(model.model, info).split.refusal
    assert refusal == "divided after layer 1, mlx-lm computes it otherwise than whole"


def test_a_model_without_one_list_of_layers_is_refused() -> None:
    class Odd(nn.Module):  # type: ignore[misc]
        @property
        def layers(self) -> list[Any]:
            return [nn.Linear(2, 2)]

    with pytest.raises(ModelError, match="Odd does not have its layers in one list"):
        with_layers(Odd(), [])


def test_a_span_shares_the_weights_of_the_model_and_leaves_it_as_it_is(tiny: TinyModel) -> None:
    model, info = loaded(tiny("llama"))
    before = list(model.model.layers)
    divided = Spans(model.model, info)(1, 2)._model
    assert all(one is other for one, other in zip(model.model.layers, before, strict=True))
    assert divided.layers[1]._layer is before[1]
    assert divided.model.embed_tokens is model.model.model.embed_tokens
