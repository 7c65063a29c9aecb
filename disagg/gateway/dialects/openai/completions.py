"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from disagg.api.events import TokenLogprob
from disagg.errors import RequestError
from disagg.gateway.dialects.base import Head
from disagg.gateway.dialects.events import AnswerPiece, Finished
from disagg.gateway.dialects.openai import common as openai
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.request import MAX_CHOICES, GatewayRequest, Prompt
from disagg.http.stream import EVENT_STREAM
from disagg.inference.types import Completion

Ids = tuple[int, ...]


class CompletionBody(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours. prompt: a text, several, the ids of tokens, or several of
    those."""

    prompt: str | tuple[str | int | Ids, ...]
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    best_of: int | None = None


class Completions:
    """The dialect of /v1/completions."""

    name: ClassVar = "completions"
    media_type: ClassVar = EVENT_STREAM
    keep_alive: ClassVar = openai.KEEP_ALIVE

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = openai.read(CompletionBody, body)
        n = fields.n or 1
        if fields.best_of not in (None, n):
            raise RequestError("best_of: not supported by this gateway unless it equals n", "leave out best_of")
        prompts = _prompts(fields.prompt)
        if len(prompts) * n > MAX_CHOICES:
            raise RequestError(f"n: {len(prompts)} prompts times {n} answers are over {MAX_CHOICES}", "send fewer")
        options = fields.options(fields.max_tokens)
        if fields.logprobs is not None:
            options["logprobs"] = fields.logprobs
        return GatewayRequest(
            model=fields.model,
            prompts=prompts,
            n=n,
            options=options,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
        )

    def writer(self, head: Head) -> CompletionWriter:
        return CompletionWriter(head)

    def error(self, problem: Problem) -> Mapping[str, Any]:
        return openai.error_body(problem)


def _prompts(given: str | tuple[str | int | Ids, ...]) -> tuple[Prompt, ...]:
    """The prompts. Raises RequestError if they are not of one of the four forms."""
    items: Sequence[str | int | Ids] = (given,) if isinstance(given, str) else given
    if items and all(isinstance(item, int) for item in items):
        return ({"tokens": [item for item in items if isinstance(item, int)]},)
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            prompts.append({"prompt": item})
        elif isinstance(item, tuple):
            prompts.append({"tokens": item})
    if not prompts or len(prompts) != len(items):
        raise RequestError("prompt: not a text, a list of texts, a list of token ids or a list of such lists")
    return tuple(prompts)


class CompletionWriter:
    """Writes one answer as text_completion objects: several of a stream, or one."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = head.request.options.get("logprobs") is not None
        self._offsets: dict[int, int] = {}

    def piece(self, piece: AnswerPiece) -> bytes:
        if not piece.text and not self._logprobs:
            return b""
        offset = self._offsets.get(piece.choice, 0)
        self._offsets[piece.choice] = offset + len(piece.text)
        return self._event(_choice(piece.choice, piece.text, self._logprobs_body(piece.tokens, offset)))

    def finished(self, finished: Finished) -> bytes:
        return self._event(_choice(finished.choice, "", None, finished.completion))

    def end(self, completions: Sequence[Completion]) -> bytes:
        if not self._head.request.include_usage:
            return openai.DONE
        usage = openai.usage_body(completions, self._head.request.n)
        return openai.event(self._body([], usage=usage)) + openai.DONE

    def error(self, problem: Problem) -> bytes:
        return openai.event(openai.error_body(problem))

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        choices = [
            _choice(index, one.text, self._logprobs_body(one.tokens, 0), one) for index, one in enumerate(completions)
        ]
        return self._body(choices, usage=openai.usage_body(completions, self._head.request.n))

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return openai.event(self._body([choice]))

    def _body(self, choices: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        head = self._head
        names = {"id": f"cmpl-{head.request_id}", "object": "text_completion", "created": int(head.created)}
        return {**names, "model": head.model, "choices": choices, **fields}

    def _logprobs_body(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self._logprobs or not tokens:
            return None
        return {
            "tokens": [openai.token_name(token.id, token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{one.name: one.logprob for one in openai.alternatives(token)} for token in tokens],
            "text_offset": [offset for _ in tokens],
        }


def _choice(
    index: int, text: str, logprobs: Mapping[str, Any] | None, completion: Completion | None = None
) -> dict[str, Any]:
    """completion: of the answer, if it is complete with this text."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
    if completion is not None:
        choice |= {"finish_reason": completion.finish_reason, "disagg": openai.disagg_body(completion)}
    return choice
