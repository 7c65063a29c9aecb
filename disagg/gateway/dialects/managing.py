"""What requests say about models themselves: how long one stays loaded after an answer, and the bodies of the calls
that load, unload, pull and delete them, as Ollama and LM Studio write them."""

from __future__ import annotations

import math
import re
from typing import Final, NoReturn

from disagg.api.base import Contract
from disagg.api.keeper import MAX_KEEP_ALIVE_S
from disagg.errors import RequestError

FOR_EVER: Final = math.inf
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = r"(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
_LENGTH: Final = re.compile(rf"(?:{_PART}({'|'.join(_UNITS)}))+")
_PARTS: Final = re.compile(rf"{_PART}({'|'.join(_UNITS)})")
_NUMBER: Final = re.compile(_PART)
_MAX_CHARS: Final = 64
KeepAlive = float | str | None
"""The field `keep_alive` of a body."""


def keep_alive_s(given: KeepAlive, field: str = "keep_alive") -> float | None:
    """Seconds that a model stays loaded after an answer, as Ollama reads them: a number of seconds, or a text such as
    "5m" and "1h30m"; FOR_EVER if it is negative. A text that is a number counts as one. None: nothing is asked for.
    Raises RequestError."""
    if given is None:
        return None
    seconds = _seconds(given) if isinstance(given, str) else float(given)
    if seconds is None or math.isnan(seconds):
        shown = given if not isinstance(given, str) or len(given) <= _MAX_CHARS else f"{given[:_MAX_CHARS]}..."
        raise RequestError(
            f"{field}: not a length of time (got {shown!r})",
            'send seconds, or a text such as "5m" or "1h30m"; 0 unloads the model after the answer, -1 keeps it',
        )
    return FOR_EVER if seconds < 0 or seconds > MAX_KEEP_ALIVE_S else seconds


def _seconds(text: str) -> float | None:
    """None if the text is no length of time."""
    body = text.strip()
    sign = -1.0 if body.startswith("-") else 1.0
    body = body[1:] if body[:1] in ("-", "+") else body
    if len(body) > _MAX_CHARS:
        return None
    if _NUMBER.fullmatch(body):
        return sign * float(body)
    if not _LENGTH.fullmatch(body):
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in _PARTS.findall(body))


class CopyBody(Contract, frozen=True):
    """Ollama's POST /api/copy."""

    source: str
    destination: str


def refuse_copy(asked: CopyBody) -> NoReturn:
    """Raises RequestError: a second name of a model stands in hosts.toml."""
    raise RequestError(
        f'models are not copied here: "{asked.destination}" would be another name of {asked.source}',
        f'add "{asked.destination}" to `aliases` of that model in hosts.toml, and run `disagg deploy`',
    )
