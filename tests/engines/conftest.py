"""Tiny checkpoints, made once per session, and engines on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from disagg.config import EngineOptions

if TYPE_CHECKING:  # torch and mlx: seconds that the tests of engines/model do without
    from disagg.engines.mlx.engine import MLXDecodeEngine
    from disagg.engines.model.constraint import Constraint
    from disagg.engines.model.text import PromptTokenizer
    from tests.engines.mlx.mlx_parts import Reference
    from tests.tiny_models import TinyModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The folder of a tiny checkpoint, by architecture. Shared: tests that change files copy them first."""
    from tests import tiny_models

    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tiny_models.make(architecture, tmp_path_factory.mktemp("tiny") / architecture)
        return made[architecture]

    return folder


@pytest.fixture(scope="session")
def mlx_engine(tiny: TinyModel) -> Iterator[Callable[[str], MLXDecodeEngine]]:
    """A running float32 decode engine, by architecture. Shared: tests leave it idle."""
    from disagg.engines.mlx.engine import MLXDecodeEngine

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
    from tests.engines.mlx.mlx_parts import Reference

    return lru_cache(lambda architecture: Reference(tiny(architecture)))


class Constrain:
    """Constraints for tests that have no event loop, all of which are closed at the end of the test."""

    def __init__(self) -> None:
        self.made: list[Constraint] = []

    def __call__(
        self, tokenizer: PromptTokenizer, grammar: str, answer: Sequence[int] = (), after: str = ""
    ) -> Constraint:
        """See PromptTokenizer.constrain."""
        self.made.append(asyncio.run(tokenizer.constrain(grammar, answer, after)))
        return self.made[-1]


@pytest.fixture
def constrain() -> Iterator[Constrain]:
    constrain = Constrain()
    yield constrain
    for constraint in constrain.made:
        constraint.close()
