"""The result of a check: what is wrong, and the command that helps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "fault"]
"""ok: correct. note: nothing to do. warning: works, but badly or not for long. fault: does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was checked, one or two words. text: the result. hint: what to do, usually a command."""

    check: str
    level: Level
    text: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, hint: str = "") -> Finding:
    return Finding(check, "note", text, hint)


def warning(check: str, text: str, hint: str) -> Finding:
    return Finding(check, "warning", text, hint)


def fault(check: str, text: str, hint: str) -> Finding:
    return Finding(check, "fault", text, hint)
