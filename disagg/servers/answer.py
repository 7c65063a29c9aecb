"""From an engine's decode steps to the `tokens` and `done` events of one answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from disagg.api.events import FinishReason, TokenLogprob, TokensEvent
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeEngine, DecodeTiming, PrefillEngine, Token
from disagg.engines.model.text import TextStream
from disagg.errors import ModelError
from disagg.servers.feed import Step
from disagg.servers.request import ActiveRequest

LEAST_LOGPROB = -9999.0
"""Sent for a token of probability 0: JSON has no infinity."""


@dataclass(slots=True)
class Answer:
    """One answer as it grows. answered: tokens that it began with. completion_tokens: those included. first_at,
    last_at: time.monotonic() when the engine had its first and last token."""

    text: TextStream
    answered: int = 0
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    timing: DecodeTiming = field(default_factory=DecodeTiming)
    first_at: float = 0.0
    last_at: float = 0.0

    @classmethod
    def resumed(cls, text: TextStream, given: Sequence[int], sampling: Sampling, eos_ids: Collection[int]) -> Answer:
        """An answer that begins with the tokens `given`, which another host has sent with their text. It is finished
        if they are all of it."""
        answer = cls(text, len(given), len(given))
        for token in given:
            text.push(token)
        if text.stopped or (given and given[-1] in eos_ids and not sampling.ignore_eos):
            answer.finish_reason = "stop"
        elif len(given) >= sampling.max_tokens:
            answer.finish_reason = "length"
        return answer

    @property
    def generated_tokens(self) -> int:
        """Tokens that this host has generated."""
        return self.completion_tokens - self.answered

    @property
    def decode_s(self) -> float:
        return self.last_at - self.first_at

    def add(self, steps: Sequence[Step]) -> TokensEvent:
        """One event for these steps. Sets `finish_reason` at the last token or a stop string; later tokens are
        dropped. Raises ModelError if a probability is NaN."""
        pieces: list[str] = []
        tokens: list[TokenLogprob] = []
        for step in steps:
            self.timing, self.last_at = step.timing, step.at
            self.first_at = self.first_at or step.at
            for token in step.tokens:
                tokens.append(_logprob(token))
                pieces.append(self._text(token))
                if self.finish_reason:
                    break
            if self.finish_reason:
                break
        self.completion_tokens += len(tokens)
        return TokensEvent("".join(pieces), tuple(tokens))

    def _text(self, token: Token) -> str:
        """The text that became certain with this token."""
        text = self.text.push(token.id)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif token.finish:
            text += self.text.finish()
            self.finish_reason = "stop" if self.text.stopped else token.finish
        return text


async def begin_answer(request: ActiveRequest, engine: PrefillEngine | DecodeEngine) -> Answer:
    """The answer to a request, with the tokens that another host has sent. Their text is computed on a worker
    thread."""
    text = engine.tokenizer.stream(request.sampling.stop)
    given = request.tokens[request.prompt_tokens :]
    if not given:
        return Answer(text)
    return await asyncio.to_thread(Answer.resumed, text, given, request.sampling, engine.info.eos_ids)


def _logprob(token: Token) -> TokenLogprob:
    top = tuple((id, _finite(logprob)) for id, logprob in token.top)
    return TokenLogprob(token.id, _finite(token.logprob), top)


def _finite(logprob: float) -> float:
    """The number as JSON can hold it. Raises ModelError if it is NaN, which callers would read as a broken event."""
    if math.isnan(logprob):
        raise ModelError(
            "the model computed a NaN probability: its weights or its dtype are wrong",
            "use another dtype, or check the weights with `disagg verify`",
        )
    return max(logprob, LEAST_LOGPROB)
