"""The answers of whole-request hosts: the pieces of a streamed one as events of ours, and the JSON that is read.
Servers differ: what they add is ignored, and what they leave out or send as null has a default. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from disagg.api.base import InvalidValue
from disagg.api.events import DoneEvent, FinishReason, Timing, TokenLogprob, TokensEvent
from disagg.api.requests import MAX_CALLS, ToolCall
from disagg.errors import DisaggError, ProtocolError, ServerUnavailable, clipped, printable

T = TypeVar("T")
MAX_MODELS: Final = 10_000
MAX_REPLY_BYTES: Final = 4 << 20
"""The longest answer that is not streamed, and the longest piece of one that is."""
MAX_ANSWER_BYTES: Final = 16 << 20
NO_ID: Final = -1
"""The id of a token that has a text only."""
_FINISHED: Final[dict[str, FinishReason]] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


@dataclass(slots=True)
class WholeAnswer:
    """One answer while its pieces arrive. host: its name, for errors. one_call: calls after the first are left out, as
    some servers ignore that only one was asked for. pieces: that had text, reasoning or a call.
    finish: as the host states it, empty until it does. warnings: what the caller should know about it."""

    host: str
    one_call: bool = False
    pieces: int = 0
    finish: str = ""
    usage: Usage | None = None
    warnings: list[str] = field(default_factory=list)
    _calls: dict[int, _Call] = field(default_factory=dict)
    _bytes: int = 0

    def take(self, data: bytes) -> TokensEvent | None:
        """What a piece has added to the answer; None if nothing. Raises the host's error if it is one, and
        ProtocolError."""
        one = self._read(data)
        if one.error is not None:
            raise _failed(self.host, described(one.error))
        self.usage = one.usage or self.usage
        choice = one.choices[0] if one.choices else Choice()
        text, reasoning = self._texts(choice)
        calls = tuple(self._finished_calls()) if choice.finish_reason and not self.finish else ()
        if self.one_call and len(calls) > 1:
            self.warnings.append(f"{self.host} sent {len(calls)} tool calls, and one was asked for: the first is used")
            calls = calls[:1]
        self.finish = choice.finish_reason or self.finish
        tokens = tuple(_tokens(choice.logprobs)) if choice.logprobs else ()
        if not (text or reasoning or calls or tokens):
            return None
        self.pieces += 1
        return TokensEvent(text, tokens, reasoning, calls)

    def done(self) -> DoneEvent:
        """The end of the answer, after its last piece. Raises ServerUnavailable if it was cut off."""
        if not self.finish:
            raise ServerUnavailable(f"{self.host} ended the stream before the answer was complete", "see its log")
        usage = self.usage
        if usage is None:
            self.warnings.append(f"{self.host} has counted no tokens: those of the answer are its pieces")
        if self.finish not in ("stop", *_FINISHED):
            self.warnings.append(f"{self.host} ended the answer: {clipped(self.finish)}")
        prompt = usage.prompt_tokens_details if usage else None
        answer = usage.completion_tokens_details if usage else None
        return DoneEvent(
            finish_reason="tool_calls" if self._calls else _FINISHED.get(self.finish, "stop"),
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else self.pieces,
            computed_prompt_tokens=0,
            timing=Timing(),
            held_tokens=(prompt.cached_tokens if prompt else None) or 0,
            reasoning_tokens=(answer.reasoning_tokens if answer else None) or 0,
        )

    def _read(self, data: bytes) -> Piece:
        try:
            return piece(data)
        except InvalidValue as error:
            raise ProtocolError(f"{self.host} sent an unreadable piece of its answer: {error}") from None

    def _texts(self, choice: Choice) -> tuple[str, str]:
        """Text and reasoning; notes parts of tool calls."""
        delta = choice.delta
        if delta is None:
            text, reasoning = choice.text or "", ""
        else:
            text = delta.content or delta.refusal or ""
            reasoning = delta.reasoning or delta.reasoning_content or ""
            for part in delta.tool_calls or ():
                self._bytes += self._calls.setdefault(part.index, _Call()).add(part)
        self._bytes += len(text) + len(reasoning)
        if self._bytes > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{self.host} sent an answer of over {MAX_ANSWER_BYTES} bytes")
        return text, reasoning

    def _finished_calls(self) -> Iterator[ToolCall]:
        for _, call in sorted(self._calls.items()):
            try:
                arguments = msgspec.json.decode(call.arguments or "{}")
            except (msgspec.DecodeError, RecursionError):
                arguments = None
            if not call.name or not isinstance(arguments, dict):
                raise ProtocolError(
                    f"{self.host} sent a tool call without a name, or whose arguments are no JSON object"
                )
            yield ToolCall(call.name, arguments, call.id)


@dataclass(slots=True)
class _Call:
    """A tool call that arrives in parts. Models repeat neither id nor name."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, part: CallPart) -> int:
        """Returns the bytes that the part has added."""
        self.id = part.id or self.id
        if part.function is None:
            return 0
        self.name = part.function.name or self.name
        given = part.function.arguments
        added = given if isinstance(given, str) else "" if given is None else msgspec.json.encode(given).decode()
        self.arguments += added
        return len(added)


def _failed(host: str, message: str) -> DisaggError:
    return DisaggError(f"{host} failed: {clipped(message) or 'it states no reason'}", "see its log")


def _tokens(logprobs: Logprobs) -> Iterator[TokenLogprob]:
    for chosen in logprobs.content or ():
        top = chosen.top_logprobs or ()
        values = tuple((NO_ID, one.logprob) for one in top)
        yield TokenLogprob(NO_ID, chosen.logprob, values, _bytes(chosen), tuple(_bytes(one) for one in top))
    for number, text in enumerate(logprobs.tokens or ()):
        likely = _at(logprobs.top_logprobs, number) or {}
        values = tuple((NO_ID, value) for value in likely.values())
        names = tuple(name.encode() for name in likely)
        yield TokenLogprob(NO_ID, _at(logprobs.token_logprobs, number) or 0.0, values, text.encode(), names)


def _at(values: Sequence[T | None] | None, number: int) -> T | None:
    return values[number] if values is not None and number < len(values) else None


def _bytes(token: Likely) -> bytes:
    return bytes(token.bytes) if token.bytes is not None else token.token.encode()


Text = Annotated[str, Meta(max_length=1 << 20)]
Word = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


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
    """A token and its log-probability. bytes: the token's text in UTF-8; null if the server does not state them."""

    token: Text
    logprob: float
    bytes: tuple[Annotated[int, Meta(ge=0, le=255)], ...] | None = None


class ChosenToken(Likely, frozen=True):
    top_logprobs: Annotated[tuple[Likely, ...], Meta(max_length=64)] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """content: what a chat has; a completion has the others, with one entry per token."""

    content: tuple[ChosenToken, ...] | None = None
    tokens: tuple[Text, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[Mapping[str, float] | None, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    """text: what a completion has; a chat has delta."""

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
