"""disagg/engines/model/bans.py: what may not come next in an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from disagg.api.sampling import Sampling
from disagg.engines.model.bans import Bans, bans, ends_of
from disagg.engines.simulated.model import ByteTokenizer

EOS = {1, 2}


@pytest.mark.parametrize(
    ("sampling", "ends"),
    [
        (Sampling(), {1, 2}),
        (Sampling(ignore_eos=True), set()),
        (Sampling(stop_token_ids=(7,)), {1, 2, 7}),
        (Sampling(stop_token_ids=(7,), ignore_eos=True), {7}),
    ],
)
def test_an_answer_ends_with_these_tokens(sampling: Sampling, ends: set[int]) -> None:
    assert ends_of(sampling, EOS) == ends


WORDS = [[5], [6, 7], [6, 7, 8], [7, 7]]


@pytest.mark.parametrize(
    ("answer", "banned"),
    [
        ([], [5]),
        ([6], [5, 7]),
        ([6, 7], [5, 7, 8]),
        ([6, 7, 7], [5, 7]),
        ([6, 9], [5]),
    ],
)
@pytest.mark.parametrize("given", [0, 1, 2])
def test_the_last_token_of_a_bad_word_may_not_follow_the_others(
    answer: Sequence[int], banned: list[int], given: int
) -> None:
    """given: tokens of the answer that another host has generated."""
    one = Bans((), 0, WORDS, answer[:given])
    for token in answer[given:]:
        one.add(token)
    assert sorted(one.now(100)) == banned


def test_nothing_ends_an_answer_before_its_least_number_of_tokens() -> None:
    one = bans(Sampling(min_tokens=3, stop_token_ids=(9,)), EOS, (), [4])
    assert one is not None and not one.reads
    assert one.now(9) == [1, 2]
    one.add(4)
    assert one.now(10) == [1, 2, 9]
    one.add(4)
    assert one.now(10) == []


def test_an_answer_without_either_has_no_bans_and_only_words_of_several_tokens_need_to_be_read() -> None:
    assert bans(Sampling(), EOS, (), [4]) is None
    assert not Bans((), 0, [[5]]).reads and Bans((), 0, [[5, 6]]).reads


def test_a_form_goes_before_a_ban() -> None:
    one = Bans((), 0, [[0], [1]])
    assert one.within(np.array([True, True, True])).tolist() == [False, False, True]
    assert one.within(np.array([True, False])).tolist() == [True, False]


def test_a_word_has_the_tokens_of_its_text_with_and_without_a_space_before_it() -> None:
    assert ByteTokenizer(256).words(["ab", " ab", "c"]) == [(97, 98), (32, 97, 98), (99,), (32, 99)]
