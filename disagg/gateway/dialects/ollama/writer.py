"""Answers as Ollama writes them: one JSON object per line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from disagg.api.events import TokenLogprob
from disagg.api.requests import ToolCall
from disagg.gateway.dialects.base import Head
from disagg.gateway.dialects.events import AnswerPiece, Finished
from disagg.gateway.dialects.openai.common import logprob_body
from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion


def error_body(problem: Problem) -> dict[str, Any]:
    """`{"error": message}`"""
    return {"error": problem.message}


@dataclass(frozen=True, slots=True)
class Parts:
    """What a line brings: text, reasoning, tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


def fields_of(text: str, parts: Parts) -> dict[str, Any]:
    """text: the name of the field that has it."""
    written: dict[str, Any] = {text: parts.text}
    if parts.reasoning:
        written["thinking"] = parts.reasoning
    if parts.calls:
        written["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in parts.calls
        ]
    return written


class OllamaWriter:
    """Writes one answer as lines of JSON, or as one object. `fields`: those that carry its parts."""

    def __init__(self, head: Head, fields: Callable[[Parts], Mapping[str, Any]]) -> None:
        self._head = head
        self._fields = fields

    def piece(self, piece: AnswerPiece) -> bytes:
        parts = Parts(piece.text, self._shown(piece.reasoning), piece.tool_calls)
        logprobs = self._logprobs(piece.tokens)
        if parts == Parts() and not logprobs:
            return b""
        return self._line(self._body(parts, done=False) | logprobs)

    def finished(self, finished: Finished) -> bytes:
        return self._line(self._last(Parts(), finished.completion))

    def end(self, completions: Sequence[Completion]) -> bytes:
        return b"" if completions else self._line(self._loaded())

    def error(self, problem: Problem) -> bytes:
        return self._line(error_body(problem))

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        if not completions:
            return self._loaded()
        (done,) = completions
        parts = Parts(done.text, self._shown(done.reasoning), done.tool_calls)
        return self._last(parts, done) | self._logprobs(done.tokens)

    def _loaded(self) -> dict[str, Any]:
        """The answer to a request that asks for none. The models of the fleet are always loaded."""
        return {**self._body(Parts(), done=True), "done_reason": "load"}

    def _shown(self, reasoning: str) -> str:
        return reasoning if self._head.request.reasoning else ""

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if "logprobs" not in self._head.request.options or not tokens:
            return {}
        return {"logprobs": [logprob_body(token) for token in tokens]}

    def _last(self, parts: Parts, completion: Completion) -> dict[str, Any]:
        metrics = completion.metrics
        return {
            **self._body(parts, done=True),
            "done_reason": "length" if completion.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(metrics.total_time),
            "load_duration": 0,
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(metrics.prefill_time),
            "eval_count": metrics.completion_tokens,
            "eval_duration": _nanoseconds(metrics.decode_time),
        }

    def _body(self, parts: Parts, *, done: bool) -> dict[str, Any]:
        return {"model": self._head.model, "created_at": timestamp(None), **self._fields(parts), "done": done}

    @staticmethod
    def _line(body: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode(body) + b"\n"


def timestamp(seconds: float | None) -> str:
    """A time since 1970, or now, as Ollama writes it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
