"""Finds texts in a notebook that address the models instead of the task. A find is shown to the teacher, no proof."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from grader.notebook import Cell

PATTERNS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(ignore|disregard|forget|override)\b.{0,40}\b(instruction|prompt|rubric|rule|above|previous)",
        r"\b(give|award|grant|assign|grade)\b.{0,40}\b(full|maximum|max|all|100|perfect|highest)\b.{0,20}"
        r"\b(points?|marks?|scores?|credits?|grades?|percent)",
        r"\b(full|maximum|perfect)\b.{0,10}\b(points|marks|score|credit|grade)\b.{0,40}\b(student|notebook|submission|section)",
        r"\b(you are|act as|as) (now |an? |the )*(ai|assistant|language model|llm|grader|grading (model|system))\b",
        r"\b(system|developer) (prompt|message)\b",
        r"\b(note|message|instructions?) (to|for) (the )?(ai|grader|grading|model|assistant|llm)\b",
        r"<\|[a-z ]+\|>|\[/?inst\]|</?student-work",
        r"\bignorier\w*\b.{0,40}\b(anweisung|vorgabe|regel)",
        r"\b(gib|vergib|erteile)\b.{0,40}\b(volle|alle|maximale)\b.{0,20}\b(punkt|note)",
    )
)
INVISIBLE: Final = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\U000e0000-\U000e007f]")
MAX_FINDS: Final = 10


class Find(BaseModel):
    """cell: its index. excerpt: the text, with what was invisible left out."""

    model_config = ConfigDict(frozen=True)

    cell: int
    excerpt: str


def find(cells: Sequence[Cell]) -> tuple[Find, ...]:
    """Instructions and invisible characters, at most one per cell."""
    found = (Find(cell=cell.index, excerpt=excerpt) for cell in cells if (excerpt := _excerpt(cell.source)))
    return tuple(found)[:MAX_FINDS]


def _excerpt(source: str) -> str:
    visible = plain(source)
    for pattern in PATTERNS:
        if match := pattern.search(visible):
            return _around(visible, match)
    hidden = INVISIBLE.findall(source)
    return f"{len(hidden)} invisible characters" if len(hidden) > 3 else ""


def _around(text: str, match: re.Match[str]) -> str:
    """The words that match, and some beside them."""
    before, after = text[: match.start()].split(" ")[-4:], text[match.end() :].split(" ")[:4]
    return f"{' '.join(before)[-40:]}{match.group()}{' '.join(after)[:40]}".strip()[:160]


def plain(source: str) -> str:
    """Lower case, one line, without invisible characters and comment signs."""
    text = unicodedata.normalize("NFKC", INVISIBLE.sub("", source)).casefold()
    return " ".join(re.sub(r"[#*_`\"'\\]+", " ", text).split())
