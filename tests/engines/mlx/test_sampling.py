"""Filters against transformers' own warpers, draws against the distribution, log-probabilities against numpy."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from disagg.api.sampling import Sampling
from disagg.engines.decoding.valid import require_within_bounds
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.mlx.sampling import adjustment
from disagg.errors import RequestError

LOGITS = np.random.default_rng(0).normal(0, 3, (1, 200)).astype(np.float32)
HOT = Sampling(temperature=0.7, seed=5)


def kept(sampling: Sampling, draws: int = 400) -> set[int]:
    """The ids that are drawn from a nearly flat distribution over what the filters keep."""
    draw = mlx_sampling.sampler(replace(sampling, temperature=1.0))
    return {int(draw(mx.array(LOGITS)).item()) for _ in range(draws)}


def test_filters_keep_what_transformers_keeps() -> None:
    scores = torch.tensor(LOGITS / 0.7)
    for name, value, warper in (
        ("top_k", 7, TopKLogitsWarper(7)),
        ("top_p", 0.8, TopPLogitsWarper(0.8)),
        ("min_p", 0.05, MinPLogitsWarper(0.05)),
    ):
        sampling = replace(HOT, **{name: value})
        filtered = mx.array(LOGITS) * (1 / 0.7)
        for keep in (mlx_sampling._top_k, mlx_sampling._top_p, mlx_sampling._min_p):
            filtered = keep(filtered, sampling)
        expected = warper(None, scores)[0].isfinite().numpy()
        assert np.array_equal(np.isfinite(np.array(filtered[0])), expected), name
        assert 1 < expected.sum() < 100


def test_filters_together_follow_the_order_of_transformers() -> None:
    sampling = replace(HOT, top_k=20, top_p=0.8, min_p=0.1)
    scores = torch.tensor(LOGITS)
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)):
        scores = warper(None, scores)

    assert kept(sampling) <= set(np.flatnonzero(scores[0].isfinite().numpy()).tolist())


def test_draws_follow_the_distribution_at_the_temperature() -> None:
    logits = mx.array(np.log(np.array([[0.1, 0.2, 0.7]], dtype=np.float32)))
    draw = mlx_sampling.sampler(Sampling(temperature=0.5, seed=1))
    counts = np.bincount([int(draw(logits).item()) for _ in range(3000)], minlength=3) / 3000
    expected = np.array([0.1, 0.2, 0.7]) ** 2 / (0.01 + 0.04 + 0.49)

    assert np.abs(counts - expected).max() < 0.03


def test_a_seed_fixes_the_draws_whatever_else_is_drawn() -> None:
    first, second, other = (mlx_sampling.sampler(replace(HOT, seed=seed)) for seed in (5, 5, 6))
    ours, theirs, different = [], [], []
    for _ in range(20):
        ours.append(int(first(mx.array(LOGITS)).item()))
        mx.random.normal((3,))  # the global random state plays no part
        theirs.append(int(second(mx.array(LOGITS)).item()))
        different.append(int(other(mx.array(LOGITS)).item()))

    assert ours == theirs != different


def test_without_a_seed_draws_differ_from_request_to_request() -> None:
    draws = [
        [int(s(mx.array(LOGITS)).item()) for _ in range(10)]
        for s in map(mlx_sampling.sampler, [replace(HOT, seed=None)] * 2)
    ]

    assert draws[0] != draws[1]


def test_greedy_requests_share_one_sampler() -> None:
    assert mlx_sampling.sampler(Sampling()) is mlx_sampling.sampler(Sampling(max_tokens=9))


def test_the_repetition_penalty_is_that_of_transformers_over_the_whole_context() -> None:
    context = list(range(0, 60, 2))
    penalty = adjustment(Sampling(repetition_penalty=1.3))
    assert penalty is not None
    for seen in (context, [*context, 199]):
        weakened = penalty(mx.array(seen), mx.array(LOGITS))
        expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), torch.tensor(LOGITS))
        assert np.allclose(np.array(weakened), expected.numpy(), rtol=1e-6)
    assert adjustment(Sampling()) is None


def test_rows_are_read_as_they_are() -> None:
    array = mx.array(LOGITS[0])
    mx.eval(array)

    row = mlx_sampling.read_row(array)

    assert np.array_equal(row, np.array(array))
    top = mlx_sampling.top_logprobs(row, 5)
    assert [value for _, value in top] == sorted(np.array(array).tolist())[:-6:-1]


def test_the_log_probability_of_one_token_is_that_of_the_whole_vocabulary_to_the_last_bit() -> None:
    for row in LOGITS:
        all_of_them = mlx_sampling.log_softmax(row)
        assert [mlx_sampling.log_probability(row, token) for token in range(len(row))] == all_of_them.tolist()


def test_the_log_probability_of_a_token_is_no_number_if_any_logit_is_none() -> None:
    row = LOGITS[0].copy()
    row[7] = math.nan
    assert math.isnan(mlx_sampling.log_probability(row, 3)) and math.isnan(mlx_sampling.log_probability(row, 7))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}: "):
        require_within_bounds(replace(Sampling(), **{field: value}))
