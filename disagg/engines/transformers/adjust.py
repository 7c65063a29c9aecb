"""What changes logits before a token is chosen, per request, in torch: penalties, bias, and a constraint.

`engines/mlx/adjust.py` does the same in mlx, step for step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from disagg.api.sampling import Sampling
from disagg.engines.model.constraint import Constraint, fitted


class Adjustment:
    """The request's penalties, bias and constraint on the logits, in this order. The repetition penalty is on prompt
    and answer, presence and frequency penalty on the answer. tokens: of the prompt and of the answer's beginning, which
    has `answered` tokens."""

    def __init__(
        self, sampling: Sampling, tokens: Sequence[int], answered: int, constraint: Constraint | None = None
    ) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._tokens = tokens
        self._answered = answered
        self._seen: torch.Tensor | None = None  # [vocab], of prompt and answer
        self._counts: torch.Tensor | None = None  # [vocab], in the answer
        self._bias: torch.Tensor | None = None  # [vocab]
        self._started = False

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [vocab], float32. Called before each token, which is then passed to `add`. Both raise RequestError
        if the answer cannot keep its form."""
        if not self._started:
            self._start(logits.shape[0])
        return self._constrained(self._biased(self._counted(self._repeated(logits))))

    def add(self, token: int) -> None:
        """Count one more token of the answer."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1.0
        if self._constraint is not None:
            self._constraint.accept(token)
            self._check()

    def _start(self, vocab: int) -> None:
        self._started = True
        sampling, tokens = self._sampling, torch.tensor(list(self._tokens), dtype=torch.long)
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab, dtype=torch.bool)
            self._seen[tokens] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            answer = tokens[len(tokens) - self._answered :]
            self._counts = torch.zeros(vocab).index_add_(0, answer, torch.ones(len(answer)))
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = torch.zeros(vocab).index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))

    def _repeated(self, logits: torch.Tensor) -> torch.Tensor:
        penalty = self._sampling.repetition_penalty
        if self._seen is None:
            return logits
        return torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _counted(self, logits: torch.Tensor) -> torch.Tensor:
        if self._counts is None:
            return logits
        logits = logits - self._counts * self._sampling.frequency_penalty
        return logits - (self._counts > 0).float() * self._sampling.presence_penalty

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._bias is None else logits + self._bias

    def _constrained(self, logits: torch.Tensor) -> torch.Tensor:
        allowed = self._constraint.allowed() if self._constraint is not None else None
        self._check()
        if allowed is None:
            return logits
        return torch.where(torch.from_numpy(fitted(allowed, logits.shape[-1])), logits, -math.inf)

    def _check(self) -> None:
        if self._constraint is not None and self._constraint.error is not None:
            raise self._constraint.error
