"""The pieces of a whole-request host's streamed answer as events of ours. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from disagg.api.base import InvalidValue
from disagg.api.events import DoneEvent, FinishReason, Timing, TokenLogprob, TokensEvent
from disagg.api.requests import ToolCall
from disagg.errors import DisaggError, ProtocolError, ServerUnavailable, clipped
from disagg.whole.answers import CallPart, Choice, Likely, Logprobs, Piece, Usage, described, piece

T = TypeVar("T")
MAX_ANSWER_BYTES: Final = 16 << 20
NO_ID: Final = -1
"""The id of a token that has a text only."""
_FINISHED: Final[dict[str, FinishReason]] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


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


@dataclass(slots=True)
class WholeAnswer:
    """One answer while its pieces arrive. host: its name, for errors. pieces: that had text, reasoning or a call.
    finish: as the host states it, empty until it does. warnings: what the caller should know about it."""

    host: str
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
