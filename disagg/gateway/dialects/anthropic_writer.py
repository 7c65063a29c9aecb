"""Answers of Anthropic's API: a message of blocks, whole or as named events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from disagg.api.base import Contract
from disagg.api.requests import ToolCall
from disagg.gateway.dialects.base import AnswerPiece, Finished, Head, Usage, Written, arguments_text
from disagg.gateway.dialects.openai import disagg_body
from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion

SIGNATURE: Final = "unsigned"
"""The signature of reasoning. Some clients send reasoning back only if it has one."""
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Kinds of errors by status; all others are api_error."""

Kind = Literal["thinking", "text"]


class AnthropicFields(Contract, frozen=True):
    """What failed, as Anthropic's clients read it."""

    type: str
    message: str


class AnthropicError(Contract, frozen=True):
    """An answer of Anthropic's API that is an error. type: "error"."""

    type: str
    error: AnthropicFields


def error_body(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is an error. Claude Code shortens its prompt after "prompt is too long"."""
    too_long = "prompt is too long: " if problem.code == "context_length_exceeded" else ""
    kind = _ERRORS.get(problem.status, "api_error")
    return AnthropicError("error", AnthropicFields(kind, too_long + problem.message)).to_json()


class AnthropicWriter:
    """Writes one answer. `message_start` has the number of the prompt's tokens if a host has counted them before the
    first token; a whole-request host does so at the end, in `message_delta`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._started = False
        self._blocks = 0  # begun
        self._open: Kind | None = None  # the kind of the last block, unless it has ended

    def piece(self, piece: AnswerPiece) -> Iterator[Written]:
        yield from self._start(*((piece.stage.prompt_tokens, piece.stage.held_tokens) if piece.stage else ()))
        if piece.reasoning and self._head.request.reasoning:
            yield from self._more("thinking", piece.reasoning)
        if piece.text:
            yield from self._more("text", piece.text)
        for call in piece.tool_calls:
            yield from self._close()
            yield self._begin({**_tool_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments_text(call)})
            yield self._of_block("content_block_stop")

    def finished(self, finished: Finished) -> Iterator[Written]:
        done = finished.completion
        yield from self._start(done.metrics.prompt_tokens, done.metrics.held_tokens)
        yield from self._close()
        yield {"type": "message_delta", "delta": _ending(done), "usage": _usage(done), "disagg": disagg_body(done)}
        yield {"type": "message_stop"}

    def end(self, completions: Sequence[Completion]) -> Iterator[Written]:
        return iter(())

    def error(self, problem: Problem) -> Iterator[Written]:
        yield error_body(problem)

    def whole(self, completions: Sequence[Completion]) -> Written:
        (done,) = completions
        message = self._message(self._content(done), _usage(done))
        return {**message, **_ending(done), "disagg": disagg_body(done)}

    def _content(self, done: Completion) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        if done.reasoning and self._head.request.reasoning:
            content.append({"type": "thinking", "thinking": done.reasoning, "signature": SIGNATURE})
        if done.text:
            content.append({"type": "text", "text": done.text})
        return [*content, *({**_tool_use(call), "input": call.arguments} for call in done.tool_calls)]

    def _start(self, prompt_tokens: int = 0, held_tokens: int = 0) -> Iterator[Written]:
        if not self._started:
            self._started = True
            yield {"type": "message_start", "message": self._message([], _usage_of(prompt_tokens, held_tokens, 0))}

    def _message(self, content: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _more(self, kind: Kind, text: str) -> Iterator[Written]:
        """More of the block of this kind, after its beginning if another one is open."""
        if self._open != kind:
            yield from self._close()
            fields = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            yield self._begin({"type": kind, **fields})
            self._open = kind
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Written) -> Written:
        self._blocks += 1
        return self._of_block("content_block_start", content_block=block)

    def _close(self) -> Iterator[Written]:
        """The end of the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        yield self._of_block("content_block_stop")

    def _delta(self, delta: Written) -> Written:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, name: str, **fields: Any) -> Written:
        return {"type": name, "index": self._blocks - 1, **fields}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _ending(done: Completion) -> dict[str, Any]:
    """Why the answer ended."""
    if done.stop and done.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop}
    return {"stop_reason": _STOP_REASONS[done.finish_reason], "stop_sequence": None}


def _usage(done: Completion) -> dict[str, Any]:
    usage = Usage.of([done], 1)
    return _usage_of(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _usage_of(prompt_tokens: int, held_tokens: int, answer_tokens: int) -> dict[str, Any]:
    """Tokens whose KV was held count as read from a cache, and not as input."""
    return {
        "input_tokens": prompt_tokens - held_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": held_tokens,
        "output_tokens": answer_tokens,
    }
