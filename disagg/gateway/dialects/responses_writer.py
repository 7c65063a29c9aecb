"""Answers of POST /v1/responses: a response of items, whole or as numbered events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from disagg.api.events import TokenLogprob
from disagg.api.requests import ToolCall
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import (
    AnswerPiece,
    CalledAs,
    Finished,
    GatewayRequest,
    Head,
    Usage,
    Written,
    arguments_text,
)
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.tools import input_of
from disagg.inference.types import Completion

SEALED: Final = "disagg:"
"""Reasoning begins like this where OpenAI's would be encrypted. Agents send it back as it is."""
Keep = Callable[[GatewayRequest, Written], None]
"""Keeps a response to a request."""
Status = Literal["in_progress", "completed", "incomplete", "failed"]
Kind = Literal["reasoning", "message"]
_DELTAS: Final[Mapping[Kind, str]] = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class ResponseWriter:
    """Writes one answer. Its items are the same in the stream's events and in the whole response. keep: gets the
    response once it is complete."""

    def __init__(self, head: Head, keep: Keep | None = None) -> None:
        self._head, self._keep = head, keep
        self._numbers = 0  # of events
        self._items: list[dict[str, Any]] = []
        self._open: Kind | None = None  # the kind of the last item, unless it has ended
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []

    def piece(self, piece: AnswerPiece) -> Iterator[Written]:
        yield from self._start()
        if piece.reasoning:
            yield from self._more("reasoning", piece.reasoning)
        if piece.text:
            yield from self._more("message", piece.text, piece.tokens)
        for call in piece.tool_calls:
            yield from self._call(call)

    def finished(self, finished: Finished) -> Iterator[Written]:
        done = finished.completion
        status: Status = "incomplete" if done.finish_reason == "length" else "completed"
        yield from self._start()
        if not self._items:  # as OpenAI does: clients read the first item of a response, whatever it holds
            yield from self._begin("message")
        yield from self._close(status)
        response = self._response(status, done)
        if self._keep is not None:
            self._keep(self._head.request, response)
        yield self._event(f"response.{status}", response=response)

    def end(self, completions: Sequence[Completion]) -> Iterator[Written]:
        return iter(())

    def error(self, problem: Problem) -> Iterator[Written]:
        """Agents read response.failed, the official client the error after it."""
        failed = {
            **self._response("failed"),
            "error": {"code": problem.code or problem.kind, "message": problem.message},
        }
        yield from self._start()
        yield self._event("response.failed", response=failed)
        yield self._event("error", **openai.error_body(problem))

    def whole(self, completions: Sequence[Completion]) -> Written:
        (done,) = completions
        # Tokens of a decode host begin with those of the reasoning; a whole-request host states those of the text only.
        tokens = done.tokens if done.metrics.method == "whole" else done.tokens[done.reasoning_tokens :]
        list(self.piece(AnswerPiece(0, done.text, tokens, done.reasoning, done.tool_calls)))
        (*_, last) = self.finished(Finished(0, done))
        response: Written = last["response"]
        return response

    def _start(self) -> Iterator[Written]:
        if not self._numbers:
            response = self._response("in_progress")
            yield self._event("response.created", response=response)
            yield self._event("response.in_progress", response=response)

    def _more(self, kind: Kind, text: str, tokens: Sequence[TokenLogprob] = ()) -> Iterator[Written]:
        """More of the item of this kind, after its beginning if another one is open."""
        if self._open != kind:
            yield from self._begin(kind)
        self._text.append(text)
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"] = self._of_tokens(tokens)
            self._logprobs += fields["logprobs"]
        yield self._of_item(f"{_DELTAS[kind]}.delta", **fields)

    def _begin(self, kind: Kind) -> Iterator[Written]:
        """The beginning of an item of this kind, after the end of the open one."""
        yield from self._close("completed")
        self._open, self._text, self._logprobs = kind, [], []
        yield self._added(self._item(kind, "in_progress", []))
        yield self._of_item("response.content_part.added", content_index=0, part=self._part(kind))

    def _close(self, status: Status) -> Iterator[Written]:
        """The end of the open item, if there is one."""
        if (kind := self._open) is None:
            return
        self._open, part = None, self._part(kind)
        text = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if kind == "message" else {})
        yield self._of_item(f"{_DELTAS[kind]}.done", content_index=0, **text)
        yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._done(self._item(kind, status, [part], self._items[-1]["id"]))

    def _call(self, call: ToolCall) -> Iterator[Written]:
        called = self._head.request.called_as.get(call.name, CalledAs("function", call.name))
        custom = called.kind == "custom"
        field, text = ("input", input_of(call.arguments)) if custom else ("arguments", arguments_text(call))
        yield from self._close("completed")
        item = {
            "id": self._id("ctc" if custom else "fc"),
            "type": "custom_tool_call" if custom else "function_call",
            "call_id": call.id,
            "name": called.name,
            **({"namespace": called.namespace} if called.namespace else {}),
            field: "",
            "status": "in_progress",
        }
        yield self._added(item)
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        yield self._of_item(f"{name}.delta", delta=text)
        yield self._of_item(f"{name}.done", **{field: text})
        yield self._done({**item, field: text, "status": "completed"})

    def _added(self, item: dict[str, Any]) -> Written:
        """The beginning of an item."""
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _done(self, item: dict[str, Any]) -> Written:
        """The end of the last item, as which it is this one."""
        self._items[-1] = item
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

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
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._head.request_id}_{len(self._items)}"

    def _of_tokens(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [openai.logprob_body(token) for token in tokens] if "logprobs" in self._head.request.options else []

    def _of_item(self, name: str, **fields: Any) -> Written:
        index = len(self._items) - 1
        return self._event(name, item_id=self._items[index]["id"], output_index=index, **fields)

    def _event(self, name: str, **fields: Any) -> Written:
        self._numbers += 1
        return {"type": name, "sequence_number": self._numbers - 1, **fields}

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
            "max_output_tokens": head.request.longest,
            "reasoning": {"effort": template.get("reasoning_effort"), "summary": None},
            "temperature": options["temperature"],
            **head.request.echoed,
            "top_p": options.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None if done is None else _usage(done),
        }
        return response if done is None else {**response, "disagg": openai.disagg_body(done)}


def _usage(done: Completion) -> dict[str, Any]:
    usage = Usage.of([done], 1)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
