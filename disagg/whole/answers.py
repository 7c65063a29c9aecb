"""The JSON of a whole-request host's answers, as far as it is read. Servers differ: what they add is ignored, and what
they leave out or send as null has a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from disagg.api.base import InvalidValue
from disagg.api.requests import MAX_CALLS
from disagg.errors import printable

MAX_MODELS: Final = 10_000
MAX_REPLY_BYTES: Final = 4 << 20
"""Of an answer that is not streamed, and of one piece of one that is."""

Text = Annotated[str, Meta(max_length=1 << 20)]
Word = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
T = TypeVar("T")


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class AnswerDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: Count | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A part of a tool call. arguments: a piece of JSON text; some servers send the object itself."""

    name: Word | None = None
    arguments: Text | dict[str, Any] | None = None


class CallPart(msgspec.Struct, frozen=True):
    index: Annotated[int, Meta(ge=0, lt=MAX_CALLS)] = 0
    id: Annotated[str, Meta(max_length=128)] | None = None
    function: CalledFunction | None = None


class Delta(msgspec.Struct, frozen=True):
    """What a piece adds to a chat's answer. reasoning, reasoning_content: two names for one thing."""

    content: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    tool_calls: Annotated[tuple[CallPart, ...], Meta(max_length=MAX_CALLS)] | None = None


class Likely(msgspec.Struct, frozen=True):
    """A token and its log-probability. bytes: of the token's text; null if the server does not state them."""

    token: Text
    logprob: float
    bytes: tuple[Annotated[int, Meta(ge=0, le=255)], ...] | None = None


class ChosenToken(Likely, frozen=True):
    top_logprobs: Annotated[tuple[Likely, ...], Meta(max_length=64)] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """content: of a chat; the others: of a completion, one entry per token."""

    content: tuple[ChosenToken, ...] | None = None
    tokens: tuple[Text, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[Mapping[str, float] | None, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    """text: of a completion; delta: of a chat."""

    delta: Delta | None = None
    text: Text | None = None
    finish_reason: Word | None = None
    logprobs: Logprobs | None = None


class Piece(msgspec.Struct, frozen=True):
    """One event of a streamed answer. error: an object, or a text."""

    choices: Annotated[tuple[Choice, ...], Meta(max_length=16)] | None = None
    usage: Usage | None = None
    error: Any = None


class ListedModel(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(max_length=1024)]


class ModelList(msgspec.Struct, frozen=True):
    data: Annotated[tuple[ListedModel, ...], Meta(max_length=MAX_MODELS)] | None


_PIECE: Final = msgspec.json.Decoder(Piece)
_MODELS: Final = msgspec.json.Decoder(ModelList)
_ANYTHING: Final = msgspec.json.Decoder()


def piece(data: bytes) -> Piece:
    """Raises InvalidValue."""
    return _read(_PIECE, data)


def models(data: bytes) -> tuple[str, ...]:
    """The names in an answer to GET /models. Raises InvalidValue."""
    return tuple(model.id for model in _read(_MODELS, data).data or ())


def described(error: Any) -> str:
    """The message of an error that a server sent; printable, empty if there is none. Servers send `{"message": ...}`,
    `{"error": ...}`, `{"detail": ...}` or a text."""
    while isinstance(error, dict):
        error = next((error[name] for name in ("message", "error", "detail") if error.get(name)), "")
    return printable(" ".join(error.split())) if isinstance(error, str) else ""


def error_in(content: bytes) -> str | None:
    """The message of an error answer; None if it is no JSON object, as that of another kind of server."""
    try:
        body = _read(_ANYTHING, content)
    except InvalidValue:
        return None
    return described(body) if isinstance(body, dict) else None


def _read(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidValue(printable(str(error).replace("`", ""))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(f"not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
