"""The adjust.py of both frameworks: penalties, bias and constraints change logits alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.engines.mlx import sampling as on_mlx
from disagg.engines.model.bans import bans
from disagg.engines.model.constraint import Constraint
from disagg.engines.transformers import sampling as on_torch

VOCAB = 50
STEPS = np.random.default_rng(0).normal(0, 3, (6, VOCAB)).astype(np.float32)
PROMPT = [1, 2, 3, 2]
ANSWER = [7, 7, 2, 9, 7, 11]
EVERYTHING = Sampling(
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.7, logit_bias=((5, 100), (2, -1.5), (2, -1))
)


Words = Sequence[Sequence[int]]
ENDS = (4, 8)
WORDS = ((3,), (7, 7), (7, 2, 9), (9, 60))


class Odd(Constraint):
    """Allows odd tokens, and all of them once it has accepted `until` tokens."""

    def __init__(self, until: int = 99, vocab: int = VOCAB) -> None:
        self.until, self.vocab, self.accepted = until, vocab, list[int]()
        self.error = None

    pending = True

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        return None if len(self.accepted) >= self.until else np.arange(self.vocab) % 2 == 1


def by_mlx(sampling: Sampling, answered: int = 0, constraint: Constraint | None = None, words: Words = ()) -> list[Any]:
    """The adjusted logits of the steps after the first `answered` tokens of the answer."""
    banned = bans(sampling, ENDS, words, ANSWER[:answered])
    adjust = on_mlx.adjustment(sampling, answered, constraint, banned)
    assert adjust is not None
    rows = []
    for step in range(answered, len(ANSWER)):
        logits = adjust(mx.array([*PROMPT, *ANSWER[:step]]), mx.array(STEPS[step : step + 1]))
        if constraint is not None:
            logits = on_mlx.constrained(lambda allowed: allowed, constraint, banned)(logits)
        rows.append(np.array(logits)[0])
    return rows


def by_torch(
    sampling: Sampling, answered: int = 0, constraint: Constraint | None = None, words: Words = ()
) -> list[Any]:
    banned = bans(sampling, ENDS, words, ANSWER[:answered])
    adjust = on_torch.Adjustment(sampling, [*PROMPT, *ANSWER[:answered]], answered, constraint, banned)
    rows = []
    for step in range(answered, len(ANSWER)):
        rows.append(adjust(torch.tensor(STEPS[step])).numpy())
        adjust.add(ANSWER[step])
    return rows


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.3),
        Sampling(presence_penalty=0.4),
        Sampling(frequency_penalty=-0.7),
        Sampling(logit_bias=((5, 100), (2, -1.5))),
        EVERYTHING,
    ],
)
def test_both_frameworks_adjust_alike_to_the_last_bit(sampling: Sampling) -> None:
    for ours, theirs in zip(by_mlx(sampling), by_torch(sampling), strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("answered", [1, 3, 5])
@pytest.mark.parametrize("adjusted", [by_mlx, by_torch])
def test_an_answer_that_goes_on_elsewhere_is_adjusted_as_if_it_had_not_stopped(adjusted: Any, answered: int) -> None:
    whole, rest = adjusted(EVERYTHING), adjusted(EVERYTHING, answered)
    assert [row.tobytes() for row in whole[answered:]] == [row.tobytes() for row in rest]


@pytest.mark.parametrize("adjusted", [by_mlx, by_torch])
def test_penalties_count_the_tokens_of_the_answer_and_not_those_of_the_prompt(adjusted: Any) -> None:
    change = [row - raw for row, raw in zip(adjusted(Sampling(presence_penalty=0.5)), STEPS, strict=True)]
    assert not change[0].any()
    assert [sorted(np.flatnonzero(row).tolist()) for row in change[1:]] == [[7], [7], [2, 7], [2, 7, 9], [2, 7, 9]]
    often = adjusted(Sampling(frequency_penalty=0.5))
    assert [float((often[step] - STEPS[step])[7]) for step in range(6)] == pytest.approx([0, -0.5, -1, -1, -1, -1.5])


@pytest.mark.parametrize("adjusted", [by_mlx, by_torch])
def test_only_the_tokens_that_a_constraint_allows_stay_possible(adjusted: Any) -> None:
    odd = Odd(until=4)
    rows: Sequence[Any] = adjusted(Sampling(), 0, odd)
    assert [np.isfinite(row).sum() for row in rows] == [VOCAB / 2] * 4 + [VOCAB] * 2
    assert odd.accepted[:5] == ANSWER[:5]


@pytest.mark.parametrize(("vocab", "possible"), [(VOCAB - 10, 20), (VOCAB + 10, 25)])
@pytest.mark.parametrize("adjusted", [by_mlx, by_torch])
def test_a_constraint_on_another_number_of_tokens_than_logits_allows_none_beyond(
    adjusted: Any, vocab: int, possible: int
) -> None:
    assert [np.isfinite(row).sum() for row in adjusted(Sampling(), 0, Odd(vocab=vocab))] == [possible] * 6


@pytest.mark.parametrize("answered", [0, 2, 5])
@pytest.mark.parametrize("adjusted", [by_mlx, by_torch])
def test_what_is_banned_is_impossible_also_in_an_answer_that_goes_on_elsewhere(adjusted: Any, answered: int) -> None:
    rows = adjusted(Sampling(min_tokens=3), answered, None, WORDS)
    impossible = [np.flatnonzero(np.isneginf(row)).tolist() for row in rows]
    assert impossible == [[3, 4, 8], [3, 4, 7, 8], [3, 4, 7, 8], [3, 9], [3], [3, 7]][answered:]
    constrained = adjusted(Sampling(min_tokens=3), answered, Odd(until=4 - answered), WORDS)
    possible = [np.flatnonzero(np.isfinite(row)).tolist() for row in constrained]
    for step, allowed in enumerate(possible, answered):
        assert allowed == [t for t in range(VOCAB) if (step >= 4 or t % 2) and t not in impossible[step - answered]]


def test_a_request_that_adjusts_nothing_has_no_processor() -> None:
    assert on_mlx.adjustment(Sampling(temperature=0.7, top_p=0.5), 3) is None
