"""Ollama's POST /api/chat and POST /api/generate: one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.events import TokenLogprob
from disagg.api.requests import MAX_MESSAGES, MAX_TOOLS, ToolCall
from disagg.errors import RequestError
from disagg.gateway.dialects.base import (
    JSON_LINES,
    REFUSED,
    AnswerPiece,
    Finished,
    GatewayRequest,
    Head,
    Prompt,
    Writer,
    Written,
    answer_length,
    read_fields,
    thinking,
)
from disagg.gateway.dialects.form import ANY_OBJECT, ToolBody, form_of, functions, json_form
from disagg.gateway.dialects.managing import KeepAlive, keep_alive_s
from disagg.gateway.dialects.openai import logprob_body
from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion

DEFAULTS: Final[Mapping[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults, unlike those of the other dialects."""
UNSUPPORTED: Final = REFUSED["ollama"]
UNSUPPORTED_OPTIONS: Final = REFUSED["ollama-options"]


class Chat:
    """The dialect of /api/chat."""

    name: ClassVar = "ollama-chat"
    framing: ClassVar = JSON_LINES

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(OllamaChatBody, body, UNSUPPORTED)
        written = [_message(one, place) for place, one in enumerate(fields.messages)]
        begun = bool(written) and written[-1]["role"] == "assistant" and bool(written[-1]["content"])
        goes_on = begun and "tool_calls" not in written[-1]
        made = fields.request({"messages": written} if written else None, fields.tools or ())
        return made.with_options(continue_final_message=True) if goes_on else made

    def writer(self, head: Head) -> Writer:
        return OllamaWriter(head, in_message=True)

    def error(self, problem: Problem) -> Mapping[str, Any]:
        return error_body(problem)


class Generate(Chat):
    """The dialect of /api/generate."""

    name: ClassVar = "ollama-generate"

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(OllamaGenerateBody, body, UNSUPPORTED)
        if fields.suffix:
            if fields.system:
                raise RequestError("system: not together with suffix", "leave one out")
            return fields.request({"prompt": fields.prompt}).with_options(suffix=fields.suffix)
        if not fields.prompt:
            return fields.request(None)
        if fields.raw:
            return fields.request({"prompt": fields.prompt})
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        return fields.request({"messages": [*system, {"role": "user", "content": fields.prompt}]})

    def writer(self, head: Head) -> Writer:
        return OllamaWriter(head, in_message=False)


class OllamaBody(Contract, frozen=True, kw_only=True):
    """What both bodies have. A stream is the default. format: "json" or a JSON schema. think: whether the model
    reasons, or how hard. keep_alive: how long it stays loaded afterwards."""

    model: str
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: KeepAlive = None

    def request(self, prompt: Prompt | None, tools: Sequence[ToolBody] = ()) -> GatewayRequest:
        """The request for the answer to this prompt; None: there is nothing to answer."""
        options = read_fields(Options, self.options or {}, UNSUPPORTED_OPTIONS)
        given = {name: value for name, value in options.to_json().items() if value is not None}
        longest = given.pop("num_predict", -1)
        if "repeat_penalty" in given:
            given["repetition_penalty"] = given.pop("repeat_penalty")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if template := self._template():
            given["chat_template_kwargs"] = template
        return GatewayRequest(
            model=self.model,
            prompts=() if prompt is None else (prompt,),
            options={
                **DEFAULTS,
                **given,
                **answer_length(None if longest < 0 else longest),
                **form_of(functions(tools), None, json_form(self._schema(), "format")),
            },
            stream=self.stream is not False,
            longest=None if longest < 0 else longest,
            reasoning=self.think is not False,
            keep_alive_s=keep_alive_s(self.keep_alive),
        )

    def _template(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return thinking(bool(self.think)) | effort

    def _schema(self) -> Mapping[str, Any] | None:
        if not self.format:
            return None
        if isinstance(self.format, str) and self.format != "json":
            raise RequestError(f'format: not "json" or a JSON schema (got {self.format!r})')
        return ANY_OBJECT if isinstance(self.format, str) else self.format


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/chat. Without messages it loads the model, or unloads it."""

    messages: Annotated[tuple[OllamaMessage, ...], Meta(max_length=MAX_MESSAGES)] = ()
    tools: Annotated[tuple[ToolBody, ...], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/generate. raw: the prompt is not rendered by the chat template. suffix: what follows the gap that the
    answer fills. Without a prompt it loads the model, or unloads it."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class Options(Contract, frozen=True, kw_only=True):
    """The object `options`, as far as it is honoured. None: not given. num_predict: under 0 is without a bound."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | tuple[str, ...] | None = None


class OllamaMessage(Contract, frozen=True):
    """One message of a chat. tool_name, tool_call_id: in a message of the role tool."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | None = None
    thinking: str | None = None
    images: tuple[Any, ...] | None = None
    tool_calls: tuple[OllamaCall, ...] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaCall(Contract, frozen=True):
    """A tool call of an earlier answer. Most clients leave out the id."""

    function: OllamaFunction
    id: str | None = None


class OllamaFunction(Contract, frozen=True):
    """The function of a tool call. Its arguments are an object."""

    name: str
    arguments: Mapping[str, Any] | None = None


def _message(message: OllamaMessage, place: int) -> dict[str, Any]:
    if message.images:
        raise RequestError(f"messages[{place}].images: models here read text only", "send text")
    written: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    calls = [
        {"name": one.function.name, "arguments": dict(one.function.arguments or {}), "id": one.id or ""}
        for one in message.tool_calls or ()
    ]
    more = {"reasoning": message.thinking, "tool_calls": calls}
    if message.role == "tool":
        more = {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return written | {name: value for name, value in more.items() if value}


class OllamaWriter:
    """Writes one answer as lines of JSON, or as one object. in_message: it is the message of a chat."""

    def __init__(self, head: Head, *, in_message: bool) -> None:
        self._head, self._in_message = head, in_message

    def piece(self, piece: AnswerPiece) -> Iterator[Written]:
        reasoning, logprobs = self._shown(piece.reasoning), self._logprobs(piece.tokens)
        if piece.text or reasoning or piece.tool_calls or logprobs:
            yield self._body(piece.text, reasoning, piece.tool_calls) | logprobs

    def finished(self, finished: Finished) -> Iterator[Written]:
        yield self._body(done=True) | _figures(finished.completion)

    def end(self, completions: Sequence[Completion]) -> Iterator[Written]:
        if not completions:
            yield self._loaded()

    def error(self, problem: Problem) -> Iterator[Written]:
        yield error_body(problem)

    def whole(self, completions: Sequence[Completion]) -> Written:
        if not completions:
            return self._loaded()
        (done,) = completions
        body = self._body(done.text, self._shown(done.reasoning), done.tool_calls, done=True)
        return body | _figures(done) | self._logprobs(done.tokens)

    def _loaded(self) -> dict[str, Any]:
        """The answer to a request that asks for none, and has loaded the model or unloaded it."""
        return self._body(done=True) | {"done_reason": "unload" if self._head.request.keep_alive_s == 0 else "load"}

    def _shown(self, reasoning: str) -> str:
        return reasoning if self._head.request.reasoning else ""

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if "logprobs" not in self._head.request.options or not tokens:
            return {}
        return {"logprobs": [logprob_body(token) for token in tokens]}

    def _body(
        self, text: str = "", reasoning: str = "", calls: Sequence[ToolCall] = (), *, done: bool = False
    ) -> dict[str, Any]:
        written: dict[str, Any] = {"content" if self._in_message else "response": text}
        if reasoning:
            written["thinking"] = reasoning
        if calls:
            written["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        if self._in_message:
            written = {"message": {"role": "assistant", **written}}
        return {"model": self._head.model, "created_at": timestamp(None), **written, "done": done}


def _figures(completion: Completion) -> dict[str, Any]:
    """Why the answer ended, and what it took."""
    metrics = completion.metrics
    return {
        "done_reason": "length" if completion.finish_reason == "length" else "stop",
        "total_duration": _nanoseconds(metrics.total_time),
        "load_duration": _nanoseconds(metrics.ttft_parts.loading),
        "prompt_eval_count": metrics.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(metrics.prefill_time),
        "eval_count": metrics.completion_tokens,
        "eval_duration": _nanoseconds(metrics.decode_time),
    }


class OllamaError(Contract, frozen=True):
    """An answer of Ollama's API that is an error."""

    error: str


def error_body(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is an error."""
    return OllamaError(problem.message).to_json()


def timestamp(seconds: float | None) -> str:
    """A time since 1970, or now, as Ollama writes it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
