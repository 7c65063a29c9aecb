"""Checkpoints on the hub whose size is known before a host has them: those of the shipped fleet and their relatives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from disagg.errors import ModelError
from disagg.planning.checkpoint import MXFP4_BITS
from disagg.planning.memory import Checkpoint, Packing, checkpoint
from disagg.planning.shapes import shape

_MLX_8BIT: Final = 8.5


def stored(source: str) -> Checkpoint | None:
    """What is known here of a source: a folder or config.json on this machine, or a hub id of the table below. None for
    others, and for architectures whose size cannot be computed."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return PUBLISHED.get(source)
    try:
        return checkpoint(json.loads(file.read_text(encoding="utf-8")), file.parent.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelError):
        return None  # loading it reports what is wrong with the file


def _published(name: str, packing: Packing, layers: float, experts: float, tables: float) -> Checkpoint:
    sized = replace(shape(name), weight_bits=layers, expert_bits=experts, head_bits=tables)
    return Checkpoint(sized, packing, name.startswith("gpt-oss"))


PUBLISHED: Final[Mapping[str, Checkpoint]] = {
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _published("qwen3-coder-30b", "none", 16, 16, 16),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": _published("qwen3-coder-30b", "fp8", 8, 8, 16),
    "mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit": _published(
        "qwen3-coder-30b", "mlx", _MLX_8BIT, _MLX_8BIT, _MLX_8BIT
    ),
    "openai/gpt-oss-120b": _published("gpt-oss-120b", "mxfp4", 16, MXFP4_BITS, 16),
    "openai/gpt-oss-20b": _published("gpt-oss-20b", "mxfp4", 16, MXFP4_BITS, 16),
    "mlx-community/gpt-oss-120b-MXFP4-Q8": _published("gpt-oss-120b", "mlx", _MLX_8BIT, MXFP4_BITS, _MLX_8BIT),
    "mlx-community/gpt-oss-20b-MXFP4-Q8": _published("gpt-oss-20b", "mlx", _MLX_8BIT, MXFP4_BITS, _MLX_8BIT),
}
