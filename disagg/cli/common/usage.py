"""What is wrong with a command line, in our words: typer passes on those of pydantic."""

from __future__ import annotations

import re
from typing import Any, Final

_OURS: Final = (
    (r"Input should be a valid integer.*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be less than or equal to (.*)", r"at most \1"),
    (r"Input should be greater than or equal to (.*)", r"at least \1"),
    (r"Input should be less than (.*)", r"under \1"),
    (r"Input should be greater than (.*)", r"over \1"),
    (r"Value error, '.*?' is not one of (.*?)\.?", r"one of \1"),
    (r"Input should be (.*)", r"\1"),
    (r"Value error, (.*)", r"\1"),
)


def usage_message(error: Any) -> str:
    """The message of click's UsageError: `--port: at most 65535 (got 99999)`, `no such option: --nope`."""
    match = re.fullmatch(r"Invalid value for (.*?): (.*)", error.format_message(), re.DOTALL)
    if match is None:
        message = " ".join(str(error.format_message()).split())
        return message[:1].lower() + message[1:].rstrip(".")
    option, reason = match[1].replace("'", ""), match[2]
    for theirs, ours in _OURS:
        if found := re.fullmatch(theirs, reason, re.DOTALL):
            return f"{option}: {found.expand(ours).replace(chr(39), '')}{_given(error)}"
    return f"{option}: {reason.rstrip('.')}"


def _given(error: Any) -> str:
    """The value that was refused, if typer kept pydantic's error."""
    faults: list[Any] = getattr(error.__cause__, "errors", list)()
    return f" (got {faults[0]['input']})" if faults else ""
