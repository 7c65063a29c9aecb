"""OpenAI's POST /v1/completions: the continuation of one text or several."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from disagg.api.events import PromptToken, TokenLogprob
from disagg.errors import CapabilityMissing, RequestError
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import (
    MAX_CHOICES,
    REFUSED,
    AnswerPiece,
    Finished,
    GatewayRequest,
    Head,
    Prompt,
    ScoredPrompt,
    Scoring,
    Written,
)
from disagg.inference.types import Completion

Ids = tuple[int, ...]


class Completions(openai.OpenAIDialect):
    """The dialect of /v1/completions."""

    name: ClassVar = "completions"

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = openai.read(CompletionBody, body, OF_COMPLETIONS, REFUSED["completions"])
        n = fields.n or 1
        best_of = _best_of(fields, n)
        prompts = _prompts(fields.prompt)
        if len(prompts) * best_of > MAX_CHOICES:
            answers = f"{len(prompts)} prompts times {best_of} answers"
            raise RequestError(f"{'n' if best_of == n else 'best_of'}: {answers} are over {MAX_CHOICES}", "send fewer")
        scoring = _scoring(fields, prompts)
        longest = 1 if scoring is not None and scoring.alone else fields.max_tokens
        options = {**fields.options(longest, lowered=False), **fields.form}
        if fields.suffix:
            options["suffix"] = _suffix(fields.suffix, prompts, scored=scoring is not None)
        if fields.logprobs is not None:
            options["logprobs"] = fields.logprobs
        return GatewayRequest(
            model=fields.model,
            prompts=prompts,
            n=best_of,
            shown=n,
            options=options,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            usage_so_far=fields.usage_so_far,
            longest=fields.max_tokens,
            scoring=scoring,
            ids_as_names=bool(fields.return_tokens_as_token_ids),
            keep_alive_s=fields.keep_alive_s,
        )

    def writer(self, head: Head) -> CompletionWriter:
        return CompletionWriter(head)


class CompletionBody(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours. prompt: a text, several, the ids of tokens, or several of
    those."""

    prompt: str | tuple[str | int | Ids, ...]
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    echo: bool | None = None


def _best_of(fields: CompletionBody, n: int) -> int:
    """How many answers a prompt gets, of which `n` are shown."""
    best_of = n if fields.best_of is None else fields.best_of
    if best_of < n:
        raise RequestError(f"best_of: fewer than n, which is {n}", "send at least n, or leave out best_of")
    if best_of > n and fields.stream:
        raise RequestError("best_of: answers are compared when all are complete", "set stream to false, or send n")
    return best_of


OF_COMPLETIONS: Final = frozenset({"suffix", "best_of", "echo", "prompt_logprobs", "return_tokens_as_token_ids"})
"""Those of the refused fields that are honoured here."""


def _scoring(fields: CompletionBody, prompts: Sequence[Prompt]) -> Scoring | None:
    """What the caller wants to know of its prompts. Raises RequestError if it wants nothing at all."""
    echo, listed, alone = bool(fields.echo), fields.prompt_logprobs, fields.max_tokens == 0
    if not echo and listed is None:
        if alone:
            raise RequestError("max_tokens: 0 gives no answer", "set echo or prompt_logprobs too, or send at least 1")
        return None
    openai.require_listable(fields)
    wanted = [count for count in (fields.logprobs if echo else None, listed) if count is not None]
    if not wanted and (alone or any("tokens" in prompt for prompt in prompts)):
        wanted = [0]
    return Scoring(echo, listed, max(wanted, default=None), alone, fields.n or 1)


def _suffix(suffix: str, prompts: Sequence[Prompt], *, scored: bool) -> str:
    """The text after the gap that the answers fill. Raises RequestError if there is none."""
    if any("tokens" in prompt for prompt in prompts):
        raise RequestError("suffix: a prompt of token ids has no gap", "send texts, or the ids of its marks, too")
    if scored:
        raise RequestError("suffix: not together with echo or prompt_logprobs", "leave one out")
    return suffix


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
        self._scoring, self._top = head.request.scoring, head.request.options.get("logprobs")
        self._scored: dict[int, ScoredPrompt] = {}

    def scored(self, prompt: ScoredPrompt) -> Sequence[Written]:
        self._scored[prompt.choice] = prompt
        if not (text := self._echo(prompt.choice)):
            return ()
        self._offsets[prompt.choice] = len(text)
        return (self._chunk(_choice(prompt.choice, text, self._prompt_logprobs(prompt.choice))),)

    def piece(self, piece: AnswerPiece) -> Iterator[Written]:
        self._note(piece)
        self._tokens += len(piece.tokens)
        if piece.text or self._logprobs:
            offset = self._offsets.get(piece.choice, 0)
            self._offsets[piece.choice] = offset + len(piece.text)
            yield self._chunk(_choice(piece.choice, piece.text, self._logprobs_body(piece.tokens, offset)))

    def finished(self, finished: Finished) -> Iterator[Written]:
        yield self._chunk(_choice(finished.choice, "", None, finished.completion))

    def whole(self, completions: Sequence[Completion]) -> Written:
        shown = [*_shown(completions, self._request.n, self._request.shown or self._request.n)]
        choices = [self._whole(number, completions[number]) | {"index": index} for index, number in enumerate(shown)]
        return self._object("text_completion", choices, completions)

    def _whole(self, index: int, one: Completion) -> dict[str, Any]:
        before = self._echo(index)
        logprobs = self._logprobs_body(one.tokens, len(before))
        if (echoed := self._prompt_logprobs(index)) is not None:
            logprobs = {name: [*values, *(logprobs or {}).get(name, ())] for name, values in echoed.items()}
        top = self._scoring.listed if self._scoring is not None else None
        listed = openai.listed(self._scored[index], top) if top is not None else None
        return {**_choice(index, before + one.text, logprobs, one), "prompt_logprobs": listed}

    def _echo(self, choice: int) -> str:
        """The prompt's text, if it comes before that of the answer."""
        if self._scoring is None or not self._scoring.echo:
            return ""
        if (given := self._request.prompts[choice // self._request.n].get("prompt")) is not None:
            return given
        return b"".join(token.bytes for token in self._scored[choice].tokens).decode(errors="replace")

    def _prompt_logprobs(self, choice: int) -> dict[str, Any] | None:
        """Log-probabilities of the prompt that comes before the answer."""
        if self._scoring is None or not self._scoring.echo or self._top is None:
            return None
        tokens, ids = self._scored[choice].tokens, self._request.ids_as_names
        return {
            "tokens": [openai.token_name(token.id, token.bytes, ids=ids) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest_there(token, self._top, ids) for token in tokens],
            "text_offset": self._prompt_offsets(choice),
        }

    def _prompt_offsets(self, choice: int) -> list[int]:
        """Where the prompt's tokens begin in its text. A tokenizer may put a mark or a space before it."""
        tokens, text = self._scored[choice].tokens, self._echo(choice)
        whole = b"".join(token.bytes for token in tokens).decode(errors="replace")
        before = len(whole) - len(text) if whole.endswith(text) else 0
        return [max(0, offset - before) for offset in _offsets(tokens, 0)]

    def _chunk(self, *choices: Written) -> Written:
        return self._object("text_completion", choices)

    def _logprobs_body(self, tokens: Sequence[TokenLogprob], offset: int) -> Written | None:
        if not self._logprobs or not tokens:
            return None
        ids = self._request.ids_as_names
        return {
            "tokens": [openai.token_name(token.id, token.bytes, ids=ids) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token, ids) for token in tokens],
            "text_offset": _offsets(tokens, offset),
        }


def _shown(completions: Sequence[Completion], n: int, shown: int) -> Iterator[int]:
    """The numbers of the answers that are shown: for each prompt, so many of its `n`, the likeliest per token first.
    Raises CapabilityMissing if that is not known."""
    if shown < n and any(one.metrics.completion_tokens and not one.tokens for one in completions):
        raise CapabilityMissing("best_of: whole-request hosts state no log-probabilities to compare by", "send n")

    def likelihood(number: int) -> float:
        logprobs = [token.logprob for token in completions[number].tokens]
        return fmean(logprobs) if logprobs else -inf

    for first in range(0, len(completions), n):
        of_prompt = range(first, first + n)
        yield from of_prompt if shown == n else sorted(of_prompt, key=likelihood, reverse=True)[:shown]


def _likeliest(token: TokenLogprob, ids: bool) -> dict[str, float]:
    """The likeliest tokens and this one, which may not be among them. ids: as names."""
    likeliest = {one.name: one.logprob for one in openai.alternatives(token, ids=ids)}
    return likeliest | {openai.token_name(token.id, token.bytes, ids=ids): token.logprob}


def _likeliest_there(token: PromptToken, top: int, ids: bool) -> dict[str, float] | None:
    """The same of a token of the prompt; None of its first."""
    if token.logprob is None:
        return None
    pairs = zip(token.top[:top], token.top_bytes[:top], strict=True)
    likeliest = {openai.token_name(id, data, ids=ids): logprob for (id, logprob), data in pairs}
    return likeliest | {openai.token_name(token.id, token.bytes, ids=ids): token.logprob}


def _offsets(tokens: Sequence[PromptToken | TokenLogprob], offset: int) -> list[int]:
    """Where the text of each token begins, in characters. offset: of the first one."""
    decoder, offsets = codecs.getincrementaldecoder("utf-8")("replace"), list[int]()
    for token in tokens:
        offsets.append(offset)
        offset += len(decoder.decode(token.bytes))
    return offsets


def _choice(index: int, text: str, logprobs: Written | None, completion: Completion | None = None) -> dict[str, Any]:
    """completion: of the answer, if it is complete with this text."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
    if completion is not None:
        choice |= {"finish_reason": completion.finish_reason, "disagg": openai.disagg_body(completion)}
    return choice
