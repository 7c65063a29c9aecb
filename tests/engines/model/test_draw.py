"""disagg/engines/model/draw.py: random numbers by seed and position, and the same choice of both frameworks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.model.draw import new_seed, uniform
from disagg.engines.transformers import sampling as torch_sampling

VOCAB = 2000


def test_a_draw_depends_on_its_seed_and_its_number_only() -> None:
    assert [uniform(7, n) for n in range(3)] == [uniform(7, n) for n in range(3)]
    assert len({uniform(seed, n) for seed in range(20) for n in range(20)}) == 400
    assert uniform(0, 0) == 0.12311941385269165


def test_draws_are_spread_evenly_over_0_to_1_and_are_exact_in_float32() -> None:
    draws = np.array([uniform((1 << 63) - 1, n) for n in range(20000)])
    assert draws.min() >= 0.0 and draws.max() < 1.0
    assert np.array_equal(draws, draws.astype(np.float32))
    assert np.abs(np.histogram(draws, 10, (0, 1))[0] / 20000 - 0.1).max() < 0.01


def test_seeds_of_their_own_differ() -> None:
    assert len({new_seed() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.02),
        Sampling(temperature=10.0),
        Sampling(temperature=1e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_frameworks_choose_the_same_tokens(sampling: Sampling, dtype: torch.dtype) -> None:
    rows = torch.randn((20, VOCAB), generator=torch.Generator().manual_seed(3)) * 3
    rows = rows.to(dtype).float()  # in bfloat16 many tokens are equally likely
    logits = mx.array(rows.numpy())
    ours = mlx_sampling.filtered(logits - mx.logsumexp(logits, axis=-1, keepdims=True), sampling)
    theirs = [torch_sampling.filtered(row, sampling) for row in rows]
    different = 0
    for number in (uniform(11, n) for n in range(10)):
        chosen = np.array(mlx_sampling.choose(ours, number)).tolist()
        different += sum(a != torch_sampling.choose(b, number) for a, b in zip(chosen, theirs, strict=True))
    assert different <= 1, f"{different} of 200 draws differ"


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-24])
def test_a_draw_never_takes_a_token_that_was_filtered_out(number: float) -> None:
    logits = np.full(9, -np.inf, np.float32)
    logits[[2, 5]] = 1.0
    expected = 2 if number < 0.5 else 5
    assert mlx_sampling.choose(mx.array(logits[None]), number).tolist() == [expected]
    assert torch_sampling.choose(torch.tensor(logits), number) == expected


def test_an_answer_that_goes_on_elsewhere_draws_what_it_would_have_drawn() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(n)) for n in range(12)]
    whole = torch_sampling.Sampler(sampling, [1])
    tokens = [whole.next(row).id for row in rows]
    for given in (1, 5, 11):
        resumed = torch_sampling.Sampler(sampling, [1, *tokens[:given]], given)
        assert [resumed.next(row).id for row in rows[given:]] == tokens[given:]
        draw = mlx_sampling.sampler(sampling, given)
        assert [int(draw(mx.array(row[None].numpy())).item()) for row in rows[given:]] == tokens[given:]


@pytest.mark.parametrize("temperature", [1e-4, 1e-3, 1.0, 10.0])
def test_every_temperature_above_the_least_one_keeps_the_likeliest_token_likeliest(temperature: float) -> None:
    logits = np.array([[-40.0, 30.0, 29.0, 1000.0, 999.0]], np.float32)
    sampling = Sampling(temperature=temperature)
    ours = np.array(mlx_sampling.filtered(mx.array(logits), sampling))[0]
    theirs = torch_sampling.filtered(torch.tensor(logits[0]), sampling).numpy()
    assert np.allclose(ours, theirs) and np.isfinite(ours).all() and ours.argmax() == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-38, 9.9e-5])
def test_a_temperature_under_the_least_one_is_greedy(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=1)
    assert mlx_sampling.sampler(sampling) is mlx_sampling.greedy
    sampler = torch_sampling.Sampler(sampling, [0])
    assert {sampler.next(torch.tensor([1.0, 1.001, 0.0])).id for _ in range(20)} == {1}
