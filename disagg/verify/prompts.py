"""Prompts for comparisons: source text of the Python standard library, which every machine has."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Final

SAMPLE_MODULES: Final = (
    "argparse", "tarfile", "typing", "subprocess", "inspect", "turtle", "pydoc", "zipfile", "decimal",
)  # fmt: skip


def sample_text() -> str:
    """About 0.9 MB of English and code."""
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in SAMPLE_MODULES)


def pieces(text: str, count: int, length: int) -> Sequence[str]:
    """`count` pieces of `length` characters, from places as far apart as the text allows."""
    text *= -(-(length + count) // len(text))
    step = max(1, (len(text) - length) // count)
    return [text[number * step : number * step + length] for number in range(count)]
