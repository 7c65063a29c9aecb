"""Ollama's POST /api/chat and POST /api/generate: one JSON object per line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_MESSAGES
from disagg.errors import RequestError
from disagg.gateway.dialects.base import Head, Writer, read_fields
from disagg.gateway.events import Finished, Piece
from disagg.gateway.problems import Problem
from disagg.gateway.request import GatewayRequest, Prompt, answer_length
from disagg.inference.types import Completion

DEFAULTS: Final[Mapping[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults, unlike those of the other dialects."""
HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "format": ("",),
    "think": (False,),
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "logprobs": (False,),
}
"""Fields that would change the answer and cannot be honoured, with the values besides null that change nothing."""
HARMLESS_OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
}
"""The same for `options`. Those about memory and threads, such as num_ctx, are the fleet's business and ignored."""


class Options(Contract, frozen=True, kw_only=True):
    """The object `options`, as far as it is honoured. None: not given. num_predict: under 0 is without a bound."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | tuple[str, ...] | None = None


class Message(Contract, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str = ""
    images: tuple[Any, ...] | None = None
    tool_calls: tuple[Any, ...] | None = None


class OllamaBody(Contract, frozen=True, kw_only=True):
    """What both bodies have. A stream is the default."""

    model: str
    stream: bool | None = None
    options: dict[str, Any] | None = None

    def request(self, prompt: Prompt) -> GatewayRequest:
        """The request for the answer to this prompt."""
        options = read_fields(Options, self.options or {}, HARMLESS_OPTIONS)
        given = {name: value for name, value in options.to_json().items() if value is not None}
        longest = given.pop("num_predict", -1)
        if "repeat_penalty" in given:
            given["repetition_penalty"] = given.pop("repeat_penalty")
        return GatewayRequest(
            model=self.model,
            prompts=(prompt,),
            options={**DEFAULTS, **given, **answer_length(None if longest < 0 else longest)},
            stream=self.stream is not False,
        )


class ChatBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]


class GenerateBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/generate. raw: the prompt is not rendered by the chat template."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None


class Chat:
    """The dialect of /api/chat."""

    name: ClassVar = "ollama-chat"
    media_type: ClassVar = "application/x-ndjson"
    keep_alive: ClassVar = b""  # a line that is not JSON would break the clients

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(ChatBody, body, HARMLESS)
        return fields.request({"messages": [_message(one, place) for place, one in enumerate(fields.messages)]})

    def writer(self, head: Head) -> Writer:
        return OllamaWriter(head, lambda text: {"message": {"role": "assistant", "content": text}})

    def error(self, problem: Problem) -> Mapping[str, Any]:
        return {"error": problem.message}


class Generate(Chat):
    """The dialect of /api/generate."""

    name: ClassVar = "ollama-generate"

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(GenerateBody, body, HARMLESS)
        if fields.raw:
            return fields.request({"prompt": fields.prompt})
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        return fields.request({"messages": [*system, {"role": "user", "content": fields.prompt}]})

    def writer(self, head: Head) -> Writer:
        return OllamaWriter(head, lambda text: {"response": text})


def _message(message: Message, place: int) -> dict[str, str]:
    unsupported = [name for name in ("images", "tool_calls") if getattr(message, name)]
    if unsupported or message.role == "tool":
        raise RequestError(f"messages[{place}].{(*unsupported, 'role')[0]}: not supported by this gateway")
    return {"role": message.role, "content": message.content}


class OllamaWriter:
    """Writes one answer as lines of JSON, or as one object. `text`: the fields that carry a text."""

    def __init__(self, head: Head, text: Callable[[str], Mapping[str, Any]]) -> None:
        self._head = head
        self._text = text

    def piece(self, piece: Piece) -> bytes:
        return self._line(self._body(piece.text, done=False)) if piece.text else b""

    def finished(self, finished: Finished) -> bytes:
        return self._line(self._last("", finished.completion))

    def end(self, completions: Sequence[Completion]) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        return self._line({"error": problem.message})

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        return self._last(completions[0].text, completions[0])

    def _last(self, text: str, completion: Completion) -> dict[str, Any]:
        metrics = completion.metrics
        return {
            **self._body(text, done=True),
            "done_reason": completion.finish_reason,
            "total_duration": _nanoseconds(metrics.total_time),
            "load_duration": 0,
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(metrics.prefill_time),
            "eval_count": metrics.completion_tokens,
            "eval_duration": _nanoseconds(metrics.decode_time),
        }

    def _body(self, text: str, *, done: bool) -> dict[str, Any]:
        return {"model": self._head.model, "created_at": timestamp(None), **self._text(text), "done": done}

    @staticmethod
    def _line(body: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode(body) + b"\n"


def timestamp(seconds: float | None) -> str:
    """A time since 1970, or now, as Ollama writes it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
