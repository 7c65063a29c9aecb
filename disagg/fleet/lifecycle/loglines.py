"""What servers log: JSON lines with "time", "level" and "event", among whatever else a process prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from disagg.errors import DisaggError
from disagg.fleet.machine.output import last_lines


def entry(line: str) -> dict[str, Any] | None:
    """The JSON object of a log line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def last_error(lines: Sequence[str]) -> DisaggError | None:
    """The last error that a server logged, None where there is none. What its supervisor logs does not count."""
    for line in reversed(lines):
        said = entry(line)
        if said is not None and said.get("level") == "error" and "message" in said:
            return DisaggError.from_json(said)
    return None


def last_words(lines: Sequence[str]) -> str:
    """The last line that is no JSON line: what the interpreter or the system said at the end."""
    return next((last_lines(line, 1) for line in reversed(lines) if line.strip() and entry(line) is None), "").strip()


def since_start(lines: Sequence[str]) -> list[str]:
    """The lines of the last run alone, as far as they are there."""
    return _since("starting", lines)


def since_ready(lines: Sequence[str]) -> list[str]:
    """The lines since the server last became healthy: of several runs, where it keeps failing to start."""
    return _since("ready", lines)


def _since(event: str, lines: Sequence[str]) -> list[str]:
    for index in range(len(lines) - 1, -1, -1):
        said = entry(lines[index])
        if said is not None and said.get("event") == event:
            return list(lines[index:])
    return list(lines)


def stopped(lines: Sequence[str]) -> bool:
    """Whether the last run ended because it was asked to. One that cannot load its model stops, too, and says why."""
    events = _events(since_start(lines))
    return "stopped" in events and "start_failed" not in events


def never_started(lines: Sequence[str]) -> bool:
    """Whether a run since the server was last healthy failed to start, be it not the very last one."""
    return "start_failed" in _events(since_ready(lines))


def _events(lines: Sequence[str]) -> set[object]:
    return {said.get("event") for line in lines if (said := entry(line)) is not None}
