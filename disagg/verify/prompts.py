"""Prompts for comparisons: source text of the Python standard library, which every machine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from importlib.abc import InspectLoader
from typing import Final

from disagg.errors import CapabilityMissing

SAMPLE_MODULES: Final = (
    "argparse", "tarfile", "typing", "subprocess", "inspect", "turtle", "pydoc", "zipfile", "decimal",
)  # fmt: skip


def sample_text() -> str:
    """About 0.9 MB of English and code. CapabilityMissing if this Python came without its source."""
    text = "\n".join(_sources())
    if not text:
        raise CapabilityMissing(
            "this Python has no source files of its standard library, of which prompts are made",
            "use a Python from python.org, the system's packages or uv",
        )
    return text


def _sources() -> Iterator[str]:
    """Each module's source. None is imported: `turtle` needs tkinter, which Debian packages separately."""
    for name in SAMPLE_MODULES:
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec is not None else None
        if isinstance(loader, InspectLoader) and (source := loader.get_source(name)):
            yield source


def pieces(text: str, count: int, length: int) -> Sequence[str]:
    """`count` pieces of `length` characters, from places as far apart as the text allows."""
    text *= -(-(length + count) // len(text))
    step = max(1, (len(text) - length) // count)
    return [text[number * step : number * step + length] for number in range(count)]
