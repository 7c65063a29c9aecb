"""From the scores of a prompt's tokens to the events of POST /score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from disagg.api.events import PromptToken, ScoresEvent
from disagg.api.requests import MAX_SCORES
from disagg.engines.base import ChunkScores
from disagg.errors import RequestError
from disagg.servers.output.answer import finite

EVENT_TOKENS: Final = 128


class PromptScores:
    """The scores of the prompt `tokens` with `top` alternatives of each, as the engine's thread gives them to `add`.
    name: the bytes of a token. RequestError if there are too many to report."""

    def __init__(self, tokens: Sequence[int], top: int, name: Callable[[int], bytes]) -> None:
        if (reported := len(tokens) * (top + 1)) > MAX_SCORES:
            raise RequestError(
                f"top: {len(tokens)} tokens with {top} alternatives each are {reported} log-probabilities, over "
                f"{MAX_SCORES}",
                "lower it, or shorten the prompt",
            )
        self._tokens, self._name = tokens, name
        self._chunks: list[ChunkScores] = []

    def add(self, scores: ChunkScores) -> None:
        self._chunks.append(scores)

    def events(self) -> Iterator[ScoresEvent]:
        """Every token of the prompt, once all are scored. Raises ModelError if a probability is NaN."""
        yield ScoresEvent((PromptToken(self._tokens[0], self._name(self._tokens[0])),))
        at = 1
        for chunk in self._chunks:
            for first in range(0, len(chunk.logprobs), EVENT_TOKENS):
                part = chunk.part(first, first + EVENT_TOKENS)
                yield ScoresEvent(tuple(self._scored(self._tokens[at : at + len(part.logprobs)], part)))
                at += len(part.logprobs)

    def _scored(self, tokens: Sequence[int], scores: ChunkScores) -> Iterator[PromptToken]:
        columns = (scores.logprobs, scores.ranks, scores.top, scores.top_logprobs)
        for token, logprob, rank, top, logprobs in zip(tokens, *(array.tolist() for array in columns), strict=True):
            pairs = tuple(zip(top, map(finite, logprobs), strict=True))
            yield PromptToken(token, self._name(token), finite(logprob), rank, pairs, tuple(map(self._name, top)))
