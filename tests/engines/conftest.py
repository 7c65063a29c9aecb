"""Tiny checkpoints, made once per session, and engines on them with one compute thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from disagg.config import EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from tests import tiny_models
from tests.engines.mlx.mlx_parts import Reference
from tests.tiny_models import TinyModel

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The folder of a tiny checkpoint, by architecture. Shared: tests that change files copy them first."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tiny_models.make(architecture, tmp_path_factory.mktemp("tiny") / architecture)
        return made[architecture]

    return folder


@pytest.fixture(scope="session")
def mlx_engine(tiny: TinyModel) -> Iterator[Callable[[str], MLXDecodeEngine]]:
    """A running float32 decode engine, by architecture. Shared: tests leave it idle."""
    engines: dict[str, MLXDecodeEngine] = {}

    def engine(architecture: str) -> MLXDecodeEngine:
        if architecture not in engines:
            options = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48)
            engines[architecture] = MLXDecodeEngine(tiny(architecture), 8192, options)
        return engines[architecture]

    yield engine
    for running in engines.values():
        running.close()


@pytest.fixture(scope="session")
def reference(tiny: TinyModel) -> Callable[[str], Reference]:
    """transformers on the same checkpoint, by architecture."""
    return lru_cache(lambda architecture: Reference(tiny(architecture)))
