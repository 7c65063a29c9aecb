"""Tiny checkpoints and the engines that serve them, made once per test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make

torch.set_num_threads(1)

CONTEXT = 8192


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny checkpoint. Shared: copy it before changing it."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lru_cache(lambda architecture: make(architecture, root / architecture))


@pytest.fixture(scope="session")
def mlx_engine(checkpoint: Callable[[str], Path]) -> Iterator[Callable]:
    """A running float32 MLXDecodeEngine per architecture."""
    from disagg.config import EngineOptions
    from disagg.engines.mlx_engine import MLXDecodeEngine

    engines: dict[str, MLXDecodeEngine] = {}

    def get(architecture: str) -> MLXDecodeEngine:
        if architecture not in engines:
            options = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48)
            engines[architecture] = MLXDecodeEngine(checkpoint(architecture), options, context=CONTEXT)
        return engines[architecture]

    yield get
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable:
    """transformers on the same checkpoint, per architecture."""
    from tests.engines.mlx_parts import Reference

    return lru_cache(lambda architecture: Reference(checkpoint(architecture)))
