"""What requests say about models themselves: how long one stays loaded after an answer, and the bodies of the calls
that load, unload, pull and delete them, as Ollama and LM Studio write them."""

from __future__ import annotations

import math
import re
from typing import Any, Final, NoReturn

from disagg.api.base import Contract
from disagg.api.keeper import MAX_KEEP_ALIVE_S
from disagg.config import Model
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


class NamedBody(Contract, frozen=True):
    """A body of Ollama's that names a model. name: an older name of `model`."""

    model: str = ""
    name: str = ""

    @property
    def named(self) -> str:
        """The model, under whichever name. Raises RequestError if there is none."""
        if named := self.model or self.name:
            return named
        raise RequestError("model: missing")


class PullBody(NamedBody, frozen=True):
    """Ollama's POST /api/pull. A stream is the default."""

    stream: bool | None = None


class LoadBody(Contract, frozen=True):
    """LM Studio's POST /api/v1/models/load. context_length: it is that of hosts.toml, and no more may be asked for.
    echo_load_config: the answer states it."""

    model: str
    context_length: int | None = None
    echo_load_config: bool | None = None


class UnloadBody(Contract, frozen=True):
    """LM Studio's POST /api/v1/models/unload. instance_id: the model, which has one instance."""

    instance_id: str


def loaded_in_lm_studio(body: LoadBody, model: Model, seconds: float) -> dict[str, Any]:
    """The answer to a load, which has taken so many seconds."""
    answer = {"type": "llm", "instance_id": model.name, "load_time_seconds": round(seconds, 3), "status": "loaded"}
    return answer | ({"load_config": {"context_length": model.context}} if body.echo_load_config else {})


def require_context(body: LoadBody, model: Model) -> None:
    """Raise RequestError if the load asks for more context than the model is served with."""
    if body.context_length is not None and body.context_length > model.context:
        raise RequestError(
            f"context_length: {model.name} is served with {model.context} tokens (got {body.context_length})",
            "leave it out, or set `context` of the model in hosts.toml",
        )


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
