"""Answers of POST /v1/responses: a response of items, whole or as numbered events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from disagg.api.events import TokenLogprob
from disagg.api.requests import ToolCall
from disagg.gateway.dialects.base import Head
from disagg.gateway.dialects.events import AnswerPiece, Finished, Usage
from disagg.gateway.dialects.openai import common as openai
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.request import CalledAs
from disagg.gateway.dialects.responses.items import SEALED
from disagg.gateway.dialects.responses.tools import input_of
from disagg.http.stream import event_bytes
from disagg.inference.types import Completion

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Kind = Literal["reasoning", "message"]
_DELTAS: Final[Mapping[Kind, str]] = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class ResponseWriter:
    """Writes one answer. Its items are the same in the stream's events and in the whole response."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._numbers = 0  # of events
        self._items: list[dict[str, Any]] = []
        self._open: Kind | None = None  # the kind of the last item, unless it has ended
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []

    def piece(self, piece: AnswerPiece) -> bytes:
        parts = [self._start()]
        if piece.reasoning:
            parts.append(self._more("reasoning", piece.reasoning, ()))
        if piece.text:
            parts.append(self._more("message", piece.text, piece.tokens))
        return b"".join([*parts, *(self._call(call) for call in piece.tool_calls)])

    def finished(self, finished: Finished) -> bytes:
        done = finished.completion
        status: Status = "incomplete" if done.finish_reason == "length" else "completed"
        before = self._start() + self._close(status)
        return before + self._event(f"response.{status}", response=self._response(status, done))

    def end(self, completions: Sequence[Completion]) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        """Agents read response.failed, the official client the error after it."""
        error = openai.error_body(problem)["error"]
        failed = {
            **self._response("failed"),
            "error": {"code": problem.code or problem.kind, "message": problem.message},
        }
        return self._start() + self._event("response.failed", response=failed) + self._event("error", error=error)

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        (done,) = completions
        # Tokens of a decode host begin with those of the reasoning; a whole-request host states those of the text only.
        tokens = done.tokens if done.metrics.method == "whole" else done.tokens[done.reasoning_tokens :]
        self.piece(AnswerPiece(0, done.text, tokens, done.reasoning, done.tool_calls))
        self.finished(Finished(0, done))
        return self._response("incomplete" if done.finish_reason == "length" else "completed", done)

    def _start(self) -> bytes:
        if self._numbers:
            return b""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _more(self, kind: Kind, text: str, tokens: Sequence[TokenLogprob]) -> bytes:
        """More of the item of this kind, after its beginning if another one is open."""
        begun = b""
        if self._open != kind:
            begun = self._close("completed") + self._begin(kind)
        self._text.append(text)
        if kind == "reasoning":
            return begun + self._of_item(f"{_DELTAS[kind]}.delta", content_index=0, delta=text)
        logprobs = self._of_tokens(tokens)
        self._logprobs += logprobs
        return begun + self._of_item(f"{_DELTAS[kind]}.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, kind: Kind) -> bytes:
        self._open, self._text, self._logprobs = kind, [], []
        self._items.append(self._item(kind, "in_progress", []))
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        return added + self._of_item("response.content_part.added", content_index=0, part=self._part(kind))

    def _close(self, status: Status) -> bytes:
        """The end of the open item, if there is one."""
        if (kind := self._open) is None:
            return b""
        self._open, part = None, self._part(kind)
        text = {"text": part["text"]} | ({"logprobs": self._logprobs} if kind == "message" else {})
        ended = self._of_item(f"{_DELTAS[kind]}.done", content_index=0, **text)
        ended += self._of_item("response.content_part.done", content_index=0, part=part)
        self._items[-1] = self._item(kind, status, [part], self._items[-1]["id"])
        return ended + self._done()

    def _call(self, call: ToolCall) -> bytes:
        called = self._head.request.called_as.get(call.name, CalledAs("function", call.name))
        custom = called.kind == "custom"
        field, text = (
            ("input", input_of(call.arguments))
            if custom
            else ("arguments", msgspec.json.encode(call.arguments).decode())
        )
        before = self._close("completed")
        item = {
            "id": self._id("ctc" if custom else "fc"),
            "type": "custom_tool_call" if custom else "function_call",
            "call_id": call.id,
            "name": called.name,
            **({"namespace": called.namespace} if called.namespace else {}),
            field: "",
            "status": "in_progress",
        }
        self._items.append(item)
        before += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        before += self._of_item(f"{name}.delta", delta=text) + self._of_item(f"{name}.done", **{field: text})
        self._items[-1] = {**item, field: text, "status": "completed"}
        return before + self._done()

    def _done(self) -> bytes:
        """The end of the last item."""
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _item(self, kind: Kind, status: Status, content: Sequence[Any], id: str = "") -> dict[str, Any]:
        if kind == "message":
            id = id or self._id("msg")
            return {"id": id, "type": kind, "role": "assistant", "status": status, "content": content}
        sealed = SEALED + "".join(self._text) if self._head.request.seal_reasoning and content else None
        fields = {"summary": [], "content": content, "encrypted_content": sealed, "status": status}
        return {"id": id or self._id("rs"), "type": kind, **fields}

    def _part(self, kind: Kind) -> dict[str, Any]:
        text = "".join(self._text)
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._head.request_id}_{len(self._items)}"

    def _of_tokens(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [openai.logprob_body(token) for token in tokens] if "logprobs" in self._head.request.options else []

    def _of_item(self, name: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(name, item_id=self._items[index]["id"], output_index=index, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._numbers, **fields}
        self._numbers += 1
        return event_bytes(msgspec.json.encode(body), name)

    def _response(self, status: Status, done: Completion | None = None) -> dict[str, Any]:
        head, options = self._head, self._head.request.options
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        template = options.get("chat_template_kwargs", {})
        response = {
            "id": f"resp_{head.request_id}",
            "object": "response",
            "created_at": int(head.created),
            "status": status,
            "model": head.model,
            "output": list(self._items),
            "error": None,
            "incomplete_details": cut,
            "max_output_tokens": None if options.get("fit_context") else options["max_tokens"],
            "parallel_tool_calls": True,
            "reasoning": {"effort": template.get("reasoning_effort"), "summary": None},
            "store": False,
            "temperature": options["temperature"],
            "text": {"format": _format(options.get("json_schema"))},
            **head.request.echoed,
            "top_p": options.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None if done is None else _usage(done),
        }
        if done is None:
            return response
        body = openai.disagg_body(done)
        return {**response, "disagg": {**body, "warnings": (*head.request.left_out, *body["warnings"])}}


def _format(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "text"}
    return {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}


def _usage(done: Completion) -> dict[str, Any]:
    usage = Usage.of([done], 1)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
