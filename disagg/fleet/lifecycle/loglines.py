"""Reading a server's log: JSON lines with "time", "level" and "event", between lines that other code printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from disagg.errors import DisaggError, FleetError
from disagg.extras import install
from disagg.fleet.machine.machine import last_lines

_FATAL = "Fatal Python error"  # faulthandler's first line, before the traces of all threads


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
    """The last error that a server logged, None if it logged none."""
    for line in reversed(lines):
        fields = entry(line)
        if fields is not None and fields.get("level") == "error" and "message" in fields:
            return DisaggError.from_json(fields)
    return None


def last_plain_line(lines: Sequence[str]) -> str:
    """The last line that is not JSON, such as the interpreter's last error message."""
    return next((last_lines(line, 1) for line in reversed(lines) if line.strip() and entry(line) is None), "").strip()


def end_of_run(lines: Sequence[str]) -> str:
    """Why a server that disagg did not stop has ended, by its log: the last error, or what was printed last. Empty if
    the log does not state it, as after SIGKILL."""
    own = since_start(lines)
    if (error := last_error(own)) is not None:
        return error.message
    if stopped(lines):
        return "it got a signal to stop, not from disagg"
    printed = _after_last_entry(own)
    fatal = [line for line in printed if line.startswith(_FATAL)]
    return last_plain_line(fatal or printed)


def failure_of_start(host: str, lines: Sequence[str]) -> DisaggError | None:
    """Why the last run did not start; None if its log does not state that. One that logged nothing, but was printed
    about, never ran disagg."""
    own = since_start(lines)
    if failed_to_start(own):
        return last_error(own)
    words = "" if any(entry(line) is not None for line in own) else last_plain_line(own)
    return FleetError(words, hint_of_start(host, words)) if words else None


def hint_of_start(host: str, words: str) -> str:
    """What to do about a start that ended with these words of a Python."""
    if "No module named 'disagg'" in words:
        return f"with the pip of that Python: {install('server')}"
    return f"disagg logs --host {host}"


def _after_last_entry(lines: Sequence[str]) -> Sequence[str]:
    count = next((index for index, line in enumerate(reversed(lines)) if entry(line) is not None), len(lines))
    return lines[len(lines) - count :]


def since_start(lines: Sequence[str]) -> list[str]:
    """The lines of the last run, as far as `lines` has them."""
    return _since("starting", lines)


def since_ready(lines: Sequence[str]) -> list[str]:
    """The lines since the server last became healthy; several runs if it keeps failing to start."""
    return _since("ready", lines)


def _since(event: str, lines: Sequence[str]) -> list[str]:
    for index in range(len(lines) - 1, -1, -1):
        fields = entry(lines[index])
        if fields is not None and fields.get("event") == event:
            return list(lines[index:])
    return list(lines)


def stopped(lines: Sequence[str]) -> bool:
    """Whether the last run ended by a stop request. A run that could not load its model logs "stopped" as well."""
    events = _events(since_start(lines))
    return "stopped" in events and "start_failed" not in events


def failed_to_start(lines: Sequence[str]) -> bool:
    """Whether any run since the server was last healthy failed to start."""
    return "start_failed" in _events(since_ready(lines))


def _events(lines: Sequence[str]) -> set[object]:
    return {fields.get("event") for line in lines if (fields := entry(line)) is not None}
