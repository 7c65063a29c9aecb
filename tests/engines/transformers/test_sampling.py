"""disagg/engines/transformers/sampling.py: draws follow the processed distribution, reports the raw one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.engines.transformers.sampling import Sampler

LOGITS = torch.tensor([3.0, 2.5, 2.0, 0.0, -1.0, -5.0])
PROMPT = [5, 4]


def draws(sampling: Sampling, count: int = 400) -> Counter[int]:
    sampler = Sampler(sampling, PROMPT)
    return Counter(sampler.next(LOGITS).id for _ in range(count))


def test_greedy_takes_the_likeliest() -> None:
    assert set(draws(Sampling(), 5)) == {0}


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    def tokens(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), PROMPT)
        return [sampler.next(LOGITS).id for _ in range(50)]

    assert tokens(1) == tokens(1) != tokens(2)


def test_two_requests_do_not_share_their_random_numbers() -> None:
    alone = Sampler(Sampling(temperature=1.0, seed=1), PROMPT)
    want = [alone.next(LOGITS).id for _ in range(30)]
    one, other = (Sampler(Sampling(temperature=1.0, seed=seed), PROMPT) for seed in (1, 2))
    got = []
    for _ in range(30):
        got.append(one.next(LOGITS).id)
        other.next(LOGITS)
    assert got == want


def test_frequencies_follow_the_distribution() -> None:
    counts = draws(Sampling(temperature=1.0, seed=0), 4000)
    for token, probability in enumerate(LOGITS.softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=1.0, top_k=2, seed=0), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.7, seed=0), {0, 1}),
        (Sampling(temperature=1.0, min_p=0.3, seed=0), {0, 1, 2}),
        (Sampling(temperature=0.05, seed=0), {0}),
    ],
)
def test_filters_leave_only_likely_tokens(sampling: Sampling, possible: set[int]) -> None:
    assert set(draws(sampling)) == possible


def test_the_repetition_penalty_counts_prompt_and_answer() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), [0])
    assert [sampler.next(LOGITS).id for _ in range(4)] == [1, 2, 0, 0]  # 3.0 / 2 from the start, then 2.5 / 2, 2.0 / 2


def test_logprobs_are_those_before_any_processor() -> None:
    raw = LOGITS.log_softmax(-1)
    token = Sampler(Sampling(temperature=0.7, top_k=1, repetition_penalty=1.3, logprobs=3), PROMPT).next(LOGITS)
    assert token.logprob == pytest.approx(float(raw[0]))
    assert [i for i, _ in token.top] == [0, 1, 2]
    assert [p for _, p in token.top] == pytest.approx(raw[:3].tolist())


def test_no_alternatives_are_reported_unless_asked_for() -> None:
    assert Sampler(Sampling(), PROMPT).next(LOGITS).top == ()


def test_half_precision_logits_are_sampled_in_float32() -> None:
    token = Sampler(Sampling(logprobs=10), PROMPT).next(LOGITS.to(torch.bfloat16))
    assert len(token.top) == len(LOGITS)
    assert token.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[0]))
