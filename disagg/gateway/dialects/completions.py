"""OpenAI's POST /v1/completions: the continuation of one text or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from disagg.api.events import TokenLogprob
from disagg.errors import RequestError
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import MAX_CHOICES, AnswerPiece, Finished, GatewayRequest, Head, Prompt, Written
from disagg.inference.types import Completion

Ids = tuple[int, ...]


class Completions(openai.OpenAIDialect):
    """The dialect of /v1/completions."""

    name: ClassVar = "completions"

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = openai.read(CompletionBody, body)
        n = fields.n or 1
        if fields.best_of not in (None, n):
            raise RequestError("best_of: not supported by this gateway unless it equals n", "leave out best_of")
        prompts = _prompts(fields.prompt)
        if len(prompts) * n > MAX_CHOICES:
            raise RequestError(f"n: {len(prompts)} prompts times {n} answers are over {MAX_CHOICES}", "send fewer")
        options = fields.options(fields.max_tokens, lowered=False)
        if fields.logprobs is not None:
            options["logprobs"] = fields.logprobs
        return GatewayRequest(
            model=fields.model,
            prompts=prompts,
            n=n,
            options=options,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            usage_so_far=fields.usage_so_far,
            longest=fields.max_tokens,
        )

    def writer(self, head: Head) -> CompletionWriter:
        return CompletionWriter(head)


class CompletionBody(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours. prompt: a text, several, the ids of tokens, or several of
    those."""

    prompt: str | tuple[str | int | Ids, ...]
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    best_of: int | None = None


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


class CompletionWriter(openai.ObjectWriter):
    """Writes one answer as text_completion objects: several of a stream, or one."""

    prefix = "cmpl"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._offsets: dict[int, int] = {}

    def piece(self, piece: AnswerPiece) -> Iterator[Written]:
        self._count(piece)
        if piece.text or self._logprobs:
            offset = self._offsets.get(piece.choice, 0)
            self._offsets[piece.choice] = offset + len(piece.text)
            yield self._chunk(_choice(piece.choice, piece.text, self._logprobs_body(piece.tokens, offset)))

    def finished(self, finished: Finished) -> Iterator[Written]:
        yield self._chunk(_choice(finished.choice, "", None, finished.completion))

    def whole(self, completions: Sequence[Completion]) -> Written:
        choices = [
            _choice(index, one.text, self._logprobs_body(one.tokens, 0), one) for index, one in enumerate(completions)
        ]
        return self._object("text_completion", choices, completions)

    def _chunk(self, *choices: Written) -> Written:
        return self._object("text_completion", choices)

    def _logprobs_body(self, tokens: Sequence[TokenLogprob], offset: int) -> Written | None:
        if not self._logprobs or not tokens:
            return None
        return {
            "tokens": [openai.token_name(token.id, token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [offset for _ in tokens],
        }


def _likeliest(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and this one, which may not be among them."""
    likeliest = {one.name: one.logprob for one in openai.alternatives(token)}
    return likeliest | {openai.token_name(token.id, token.bytes): token.logprob}


def _choice(index: int, text: str, logprobs: Written | None, completion: Completion | None = None) -> Written:
    """completion: of the answer, if it is complete with this text."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
    if completion is not None:
        choice |= {"finish_reason": completion.finish_reason, "disagg": openai.disagg_body(completion)}
    return choice
