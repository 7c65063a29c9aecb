"""The architectures whose hand-off disagg's own tests compare with both frameworks alone, in float32, and the versions
of the frameworks that they ran with.

A model of another one, or on other versions, is served if the preflight finds no difference, but marked: `disagg
verify` compares its answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

SERIES: Final[Mapping[str, str]] = {"transformers": "5.23", "mlx-lm": "0.32", "vllm": "0.32"}
"""The minor series of each package that computes."""

FILE: Final = Path(__file__).with_suffix(".txt")
VERIFIED: Final = frozenset(FILE.read_text(encoding="utf-8").split())
"""By the `model_type` of the part that reads text. Written by `python -m tests.surveys.architectures`."""


def verified(architecture: str, versions: Mapping[str, str]) -> bool:
    """Whether the tests have compared this architecture on these versions of an engine's packages."""
    known = all(versions[name].startswith(f"{series}.") for name, series in SERIES.items() if name in versions)
    return known and architecture in VERIFIED
