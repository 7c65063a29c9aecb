"""Which splits of a model's layers are compared, and how: with each end alone, by the likeliest tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from disagg.api.layout import SplitLayout
from disagg.api.verify import RunComparison, SplitComparison, VerifyBounds
from disagg.verify.compare import Answer, agrees, compare_answers

QUARTERS: Final = (1, 2, 3)
Answers = Sequence[Answer]


def split_layers(split: SplitLayout) -> Sequence[int]:
    """The `quarters` of a model, of which at least one layer keeps something."""
    least = split.places[0] + 1
    return sorted({max(least, layers) for layers in quarters(split.layers)} - {split.layers})


def quarters(layers: int) -> Sequence[int]:
    """A quarter, half and three quarters of so many layers, as far as these are different, and neither none nor all."""
    return sorted({layers * quarter // 4 for quarter in QUARTERS} - {0, layers})


def compare_split(
    layers: int, by_split: Answers, alone: tuple[Answers, Answers], computed_tokens: int, *, limit: VerifyBounds
) -> SplitComparison:
    """Answers to one prompt after the other, by the split, and by the prefill and the decode end alone; empty if an end
    does not answer alone. limit: what they may differ by."""
    prefill, decode = (compare_answers(by_split, answers) if answers else None for answers in alone)
    why = "; ".join(_differences(prefill, decode, computed_tokens, limit))
    return SplitComparison(
        layers=layers,
        vs_prefill=prefill,
        vs_decode=decode,
        computed_tokens=computed_tokens,
        ok=not why,
        why=why,
    )


def _differences(
    prefill: RunComparison | None, decode: RunComparison | None, computed_tokens: int, limit: VerifyBounds
) -> Iterator[str]:
    for end, found in (("prefill", prefill), ("decode", decode)):
        if found is not None and not agrees(found, limit):
            yield f"it differs from {end} alone"
    if computed_tokens != 1:
        yield f"the decode end computed {computed_tokens} tokens of a prompt itself"
