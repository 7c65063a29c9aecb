"""Tiny checkpoints, made once per session, and engines on them with one compute thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tiny_models
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
