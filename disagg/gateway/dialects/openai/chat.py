"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from disagg.api.events import TokenLogprob
from disagg.api.requests import MAX_MESSAGES, MAX_TOOLS
from disagg.errors import RequestError
from disagg.gateway.dialects.base import Head
from disagg.gateway.dialects.events import AnswerPiece, Finished
from disagg.gateway.dialects.form import ResponseFormat, ToolBody, form_of, functions, schema_of
from disagg.gateway.dialects.openai import common as openai
from disagg.gateway.dialects.openai.messages import Message, call_body, messages
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.request import GatewayRequest
from disagg.http.stream import EVENT_STREAM
from disagg.inference.types import Completion


class ChatBody(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[tuple[ToolBody, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class ChatCompletions:
    """The dialect of /v1/chat/completions."""

    name: ClassVar = "chat"
    media_type: ClassVar = EVENT_STREAM
    keep_alive: ClassVar = openai.KEEP_ALIVE

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = openai.read(ChatBody, _without_single_call(body), openai.OF_CHATS)
        longest = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        options = fields.options(longest)
        if fields.logprobs:
            options["logprobs"] = fields.top_logprobs or 0
        elif fields.top_logprobs:
            raise RequestError("top_logprobs: needs logprobs", "set logprobs to true")
        template = dict(fields.chat_template_kwargs or {})
        if fields.reasoning_effort is not None:
            template["reasoning_effort"] = fields.reasoning_effort
        if template:
            options["chat_template_kwargs"] = template
        tools = () if fields.tool_choice == "none" else functions(fields.tools or ())
        options |= form_of(tools, fields.tool_choice, schema_of(fields.response_format))
        return GatewayRequest(
            model=fields.model,
            prompts=({"messages": messages(fields.messages)},),
            n=fields.n or 1,
            options=options,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
        )

    def writer(self, head: Head) -> ChatWriter:
        return ChatWriter(head)

    def error(self, problem: Problem) -> Mapping[str, Any]:
        return openai.error_body(problem)


class ChatWriter:
    """Writes one answer as chat.completion chunks, or as one chat.completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = head.request.options.get("logprobs") is not None
        self._calls: dict[int, int] = {}  # written so far, by choice; the choices that have begun

    def piece(self, piece: AnswerPiece) -> bytes:
        choice, logprobs = piece.choice, self._logprobs_body(piece.tokens)
        parts = [b"" if choice in self._calls else self._start(choice)]
        if piece.reasoning:
            parts.append(self._chunk(choice, _reasoning(piece.reasoning)))
        if piece.text or logprobs:
            parts.append(self._chunk(choice, {"content": piece.text}, logprobs=logprobs))
        if piece.tool_calls:
            first = self._calls[choice]
            self._calls[choice] += len(piece.tool_calls)
            calls = [{"index": number, **call_body(call)} for number, call in enumerate(piece.tool_calls, first)]
            parts.append(self._chunk(choice, {"tool_calls": calls}))
        return b"".join(parts)

    def finished(self, finished: Finished) -> bytes:
        start = b"" if finished.choice in self._calls else self._start(finished.choice)
        completion = finished.completion
        extra = {"disagg": openai.disagg_body(completion)}
        return start + self._chunk(finished.choice, {}, completion.finish_reason, extra=extra)

    def end(self, completions: Sequence[Completion]) -> bytes:
        if not self._head.request.include_usage:
            return openai.DONE
        usage = openai.usage_body(completions, self._head.request.n)
        return openai.event(self._body("chat.completion.chunk", choices=[], usage=usage)) + openai.DONE

    def error(self, problem: Problem) -> bytes:
        return openai.event(openai.error_body(problem))

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        usage = openai.usage_body(completions, self._head.request.n)
        return self._body("chat.completion", choices=choices, usage=usage)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(completion),
            "logprobs": self._logprobs_body(completion.tokens),
            "finish_reason": completion.finish_reason,
            "disagg": openai.disagg_body(completion),
        }

    def _start(self, choice: int) -> bytes:
        self._calls[choice] = 0
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        one = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **(extra or {})}
        return openai.event(self._body("chat.completion.chunk", choices=[one]))

    def _body(self, kind: str, **fields: Any) -> dict[str, Any]:
        head = self._head
        names = {"id": f"chatcmpl-{head.request_id}", "object": kind, "created": int(head.created)}
        return {**names, "model": head.model, **fields}

    def _logprobs_body(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs or not tokens:
            return None
        return {"content": [openai.logprob_body(token) for token in tokens]}


def _message(completion: Completion) -> dict[str, Any]:
    """The whole answer. A message that only calls tools has no content."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.reasoning:
        message |= _reasoning(completion.reasoning)
    if completion.tool_calls:
        message["content"] = completion.text or None
        message["tool_calls"] = [call_body(call) for call in completion.tool_calls]
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _without_single_call(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """parallel_tool_calls = false is honoured if a call is forced: a forced answer is one call. LangChain sends both
    for structured output."""
    forced = body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), dict)
    if forced and body.get("parallel_tool_calls") is False:
        return {name: value for name, value in body.items() if name != "parallel_tool_calls"}
    return body
