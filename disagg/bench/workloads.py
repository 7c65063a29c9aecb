"""The requests to send: random token ids of exact counts, the texts of a file, or a trace with shared prefixes.

Token ids differ between modes, so that no cache filled by one mode helps another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.bench.datasets import BLOCK_TOKENS, TextItem, TraceRow
from disagg.bench.plan import Point
from disagg.bench.records import Mode


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request: exactly one of `text` and `tokens`. The servers count the tokens of a text."""

    output_tokens: int
    text: str | None = None
    tokens: tuple[int, ...] | None = None

    def request(self) -> dict[str, Any]:
        """Keyword arguments of AsyncClient.stream. End of sequence is ignored, so that the output count is exact."""
        prompt = {"prompt": self.text} if self.tokens is None else {"tokens": self.tokens}
        return {**prompt, "max_tokens": self.output_tokens, "ignore_eos": True}


class Workload(Protocol):
    """A source of items."""

    @property
    def label(self) -> str:
        """A description for reports."""

    @property
    def times(self) -> Sequence[float]:
        """Its own arrival times in seconds; empty if it has none."""

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        """The request with this number, the same for the same arguments."""


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Uniformly random ids below `vocab_size`, `prompt_tokens` of the point; no two requests share a prefix."""

    vocab_size: int
    seed: int = 0
    times: Sequence[float] = ()
    label: str = "random token ids"

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        assert point.prompt_tokens is not None and point.output_tokens is not None
        key = f"{self.seed}/{mode}/{point.prompt_tokens}/{point.output_tokens}/{point.load.label}/{index}"
        return WorkloadItem(point.output_tokens, tokens=_ids(key, point.prompt_tokens, self.vocab_size))


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in a cycle. The length of an answer is the item's, else the point's."""

    items: Sequence[TextItem]
    label: str
    times: Sequence[float] = ()

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        chosen = self.items[index % len(self.items)]
        output = chosen.output_tokens or point.output_tokens
        assert output is not None
        return WorkloadItem(output, text=chosen.prompt)


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """A trace's lengths and times; blocks with equal hash ids get equal tokens."""

    rows: Sequence[TraceRow]
    vocab_size: int
    label: str
    seed: int = 0
    times: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(row.timestamp / 1e3 for row in self.rows))

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        row = self.rows[index % len(self.rows)]
        tokens: list[int] = []
        for block in row.hash_ids:
            tokens += _ids(f"{self.seed}/{mode}/block/{block}", BLOCK_TOKENS, self.vocab_size)
        return WorkloadItem(row.output_length, tokens=tuple(tokens[: row.input_length]))


def _ids(key: str, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random.Random(key).choices(range(vocab_size), k=count))
