"""disagg/engines/vllm/served/description.py: the model around the attention layers that vLLM shows a connector."""

from __future__ import annotations

import pytest
import torch

from disagg.engines.vllm.served.description import model_around
from disagg.errors import ModelError


def test_the_model_is_what_holds_all_attention_layers() -> None:
    attention = [torch.nn.Identity() for _ in range(2)]
    layers = torch.nn.ModuleList(torch.nn.Sequential(one, torch.nn.Identity()) for one in attention)
    model = torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Identity()})
    assert model_around(attention) is model


def test_layers_of_two_models_are_refused() -> None:
    attention = [torch.nn.Identity() for _ in range(2)]
    models = [torch.nn.Sequential(one) for one in attention]
    with pytest.raises(ModelError, match="is not found"):
        model_around(attention)
    assert len(models) == 2
