"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.events import TokenLogprob
from disagg.api.requests import MAX_MESSAGES
from disagg.errors import RequestError
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import Head
from disagg.gateway.events import Finished, Piece
from disagg.gateway.problems import Problem
from disagg.gateway.request import GatewayRequest
from disagg.inference.types import Completion


class ContentPart(Contract, frozen=True):
    """A part of a message's content. Only text is understood."""

    type: str
    text: str = ""


class Message(Contract, frozen=True):
    """One message of the chat."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | tuple[ContentPart, ...] | None = None
    tool_calls: tuple[Any, ...] | None = None


class ChatBody(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatCompletions:
    """The dialect of /v1/chat/completions."""

    name: ClassVar = "chat"
    media_type: ClassVar = openai.SSE
    keep_alive: ClassVar = openai.KEEP_ALIVE

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = openai.read(ChatBody, body)
        longest = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        options = fields.options(longest)
        if fields.logprobs:
            options["logprobs"] = fields.top_logprobs or 0
        elif fields.top_logprobs:
            raise RequestError("top_logprobs: needs logprobs", "set logprobs to true")
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


def messages(given: Sequence[Message]) -> list[dict[str, str]]:
    """The messages as disagg's hosts take them. Raises RequestError for content that is not text, and for tools."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(message: Message, place: str) -> dict[str, str]:
    if message.tool_calls or message.role in ("tool", "function"):
        raise RequestError(
            f"{place}.{'tool_calls' if message.tool_calls else 'role'}: tools are not supported by this gateway"
        )
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    if not isinstance(content, str):
        for index, part in enumerate(content):
            if part.type != "text":
                raise RequestError(f"{place}.content[{index}].type: {part.type!r} is not supported", "send text only")
        content = "".join(part.text for part in content)
    return {"role": role, "content": content}


class ChatWriter:
    """Writes one answer as chat.completion chunks, or as one chat.completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = head.request.options.get("logprobs") is not None
        self._started: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        logprobs = self._logprobs_body(piece.tokens)
        start = b"" if piece.choice in self._started else self._start(piece.choice)
        if not piece.text and not logprobs:
            return start
        return start + self._chunk(piece.choice, {"content": piece.text}, logprobs=logprobs)

    def finished(self, finished: Finished) -> bytes:
        start = b"" if finished.choice in self._started else self._start(finished.choice)
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
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self._logprobs_body(completion.tokens),
            "finish_reason": completion.finish_reason,
            "disagg": openai.disagg_body(completion),
        }

    def _start(self, choice: int) -> bytes:
        self._started.add(choice)
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
        return {"content": [_logprob(token) for token in tokens]}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": name, "logprob": logprob, "bytes": None} for name, logprob in openai.alternatives(token)]
    return {"token": openai.token_name(token.id), "logprob": token.logprob, "bytes": None, "top_logprobs": top}
