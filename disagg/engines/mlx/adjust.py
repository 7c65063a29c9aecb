"""What changes logits before a token is chosen, per request, in mlx: penalties, bias, and a constraint.

`engines/transformers/adjust.py` does the same in torch, step for step. A constraint acts in two places, between which
its process finds the next mask, for all answers of a step at the same time: `Adjustment` tells it the last token,
`constrained` waits for the mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from disagg.api.sampling import Sampling
from disagg.engines.model.constraint import Constraint, fitted


def adjustment(sampling: Sampling, answered: int = 0, constraint: Constraint | None = None) -> Adjustment | None:
    """A new adjustment for one request, of whose answer `answered` tokens are given; None if nothing is adjusted."""
    counted = sampling.presence_penalty or sampling.frequency_penalty
    if sampling.repetition_penalty != 1.0 or counted or sampling.logit_bias or constraint:
        return Adjustment(sampling, answered, constraint)
    return None


class Adjustment:
    """A logits processor: the request's penalties and bias, in this order, and the tokens for its constraint. The
    repetition penalty is on prompt and answer, presence and frequency penalty on the answer.

    raw: the model's unprocessed logits [1, vocab], float32, of the steps not reported yet, oldest first. Reported
    log-probabilities are computed from these.
    """

    def __init__(self, sampling: Sampling, answered: int, constraint: Constraint | None) -> None:
        self._sampling = sampling
        self._answered = answered
        self._constraint = constraint
        self._started = False
        self._seen: Any = None  # [vocab], of prompt and answer
        self._counts: Any = None  # [vocab], in the answer
        self._bias: Any = None  # [vocab]
        self.raw: deque[Any] = deque()

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """tokens: all of the sequence so far. logits: [1, vocab], float32. Called once per step."""
        self.raw.append(logits)
        if not self._started:
            self._start(tokens, logits.shape[-1])
        else:
            self._add(tokens[-1:])
        logits = self._biased(self._counted(self._repeated(logits)))
        if self._constraint is not None and self._constraint.pending:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # computed while the mask is found
        return logits

    def _start(self, tokens: Any, vocab: int) -> None:
        self._started = True
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            self._seen = mx.zeros((vocab,), dtype=mx.bool_)
            self._seen[tokens] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = mx.zeros((vocab,), dtype=mx.float32)
            if self._answered:
                self._counts = self._counts.at[tokens[-self._answered :]].add(1.0)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = mx.zeros((vocab,), dtype=mx.float32).at[mx.array(ids)].add(mx.array(values))

    def _add(self, token: Any) -> None:
        """Count one more token of the answer. A constraint needs to know which it is, and waits for its step."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts = self._counts.at[token].add(1.0)
        if self._constraint is not None:
            self._constraint.accept(int(token.item()))

    def _repeated(self, logits: Any) -> Any:
        penalty = self._sampling.repetition_penalty
        if self._seen is None:
            return logits
        return mx.where(self._seen, mx.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _counted(self, logits: Any) -> Any:
        if self._counts is None:
            return logits
        logits = logits - self._counts * self._sampling.frequency_penalty
        return logits - (self._counts > 0).astype(mx.float32) * self._sampling.presence_penalty

    def _biased(self, logits: Any) -> Any:
        return logits if self._bias is None else logits + self._bias


def constrained(sampler: Callable[[Any], Any], constraint: Constraint) -> Callable[[Any], Any]:
    """A sampler that chooses only what the constraint allows."""

    def choose(logprobs: Any) -> Any:
        allowed = constraint.allowed()
        if allowed is not None:
            logprobs = mx.where(mx.array(fitted(allowed, logprobs.shape[-1])), logprobs, -mx.inf)
        return sampler(logprobs)

    return choose
