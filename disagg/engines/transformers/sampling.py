"""Choose the next token from logits with transformers' own processors, one set per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from disagg.api.sampling import Sampling
from disagg.engines.base import Token


class Sampler:
    """Chooses the tokens of one request. The repetition penalty applies to tokens of the prompt and the answer."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._processors = _processors(sampling)
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._seen = torch.tensor([list(prompt)], dtype=torch.long)

    def next(self, logits: torch.Tensor) -> Token:
        """logits: [vocab], any device and dtype. Reported log-probabilities are the model's, before any processor."""
        with torch.inference_mode():
            return self._choose(logits.to("cpu", torch.float32))

    def _choose(self, raw: torch.Tensor) -> Token:
        scores = self._processors(self._seen, raw[None])[0] if self._processors else raw
        if self._sampling.temperature == 0:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        self._seen = torch.cat([self._seen, torch.tensor([[token]])], dim=1) if self._penalises else self._seen
        return self._report(token, raw.log_softmax(-1))

    @property
    def _penalises(self) -> bool:
        return self._sampling.repetition_penalty != 1.0

    def _report(self, token: int, logprobs: torch.Tensor) -> Token:
        top = logprobs.topk(min(self._sampling.logprobs or 0, logprobs.shape[0]))
        pairs = tuple(zip((int(i) for i in top.indices), (float(p) for p in top.values), strict=True))
        return Token(token, float(logprobs[token]), pairs)


def _processors(sampling: Sampling) -> LogitsProcessorList:
    """The processors, in the order in which transformers' `generate` applies them."""
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature == 0:
        return chosen
    if sampling.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen
