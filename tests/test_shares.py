"""disagg/shares.py: who may take a place, who yields one, who is next, as tables."""

from __future__ import annotations

import pytest

from disagg.api.requests import Share
from disagg.shares import (
    Claim,
    Computing,
    Counted,
    Place,
    Places,
    ahead,
    kept_free,
    least,
    may_take,
    next_in_turn,
    rank,
    share,
    yielding,
)

NOW = 100.0


def claims(**held: int | tuple[int, int]) -> dict[str, Claim]:
    """By key: what it has, or that and its weight."""
    return {key: Claim(1, has) if isinstance(has, int) else Claim(has[1], has[0]) for key, has in held.items()}


@pytest.mark.parametrize(
    ("held", "key", "expected"),
    [
        pytest.param({"a": 0}, "a", 16, id="alone, everything"),
        pytest.param({"a": 9, "b": 0}, "b", 8, id="of two, half"),
        pytest.param({"a": (0, 3), "b": 0}, "a", 12, id="by weight"),
    ],
)
def test_the_share_of_a_key(held: dict[str, int], key: str, expected: float) -> None:
    assert share(claims(**held), key, 16) == expected


@pytest.mark.parametrize(
    ("held", "key", "more", "expected"),
    [
        pytest.param({"a": 15}, "a", 1, True, id="a key alone takes the last place"),
        pytest.param({"a": 16}, "a", 1, False, id="and none beyond"),
        pytest.param({"a": 0}, "a", 17, False, id="nor more than there are"),
        pytest.param({"a": 14, "b": 0}, "a", 1, True, id="over its share, it leaves one free"),
        pytest.param({"a": 15, "b": 0}, "a", 1, False, id="the last free one is that of the key without any"),
        pytest.param({"a": 15, "b": 0}, "b", 1, True, id="which may take it"),
        pytest.param({"a": 13, "b": 0, "c": 0, "d": 0}, "a", 1, False, id="one free for each such key"),
        pytest.param({"a": 12, "b": 1, "c": 0, "d": 0}, "a", 1, True, id="a key that has some needs none"),
        pytest.param({"a": 12, "b": 1, "c": 0, "d": 0}, "b", 3, True, id="within its share, every free one"),
        pytest.param({"a": 11, "b": 1, "c": 0, "d": 0}, "b", 4, False, id="beyond its share, not"),
        pytest.param({"a": 9, "b": 0, **dict.fromkeys("cdefghijkl", 0)}, "a", 1, False, id="over half of them"),
        pytest.param({"a": 7, "b": 0, **dict.fromkeys("cdefghijkl", 0)}, "a", 1, True, id="half are never kept free"),
        pytest.param({"a": 15, **dict.fromkeys("bcdefghijklmnopqrstuvw", 0)}, "b", 1, True, id="a first one, always"),
    ],
)
def test_who_may_take_a_free_place_of_16(held: dict[str, int], key: str, more: int, expected: bool) -> None:
    assert may_take(claims(**held), key, 16, more) is expected


@pytest.mark.parametrize(
    ("limit", "others", "expected"), [(16, 0, 0), (16, 3, 3), (16, 100, 8), (2, 5, 1), (1, 5, 0), (512, 100, 100)]
)
def test_places_are_kept_free_for_keys_without_any_but_never_more_than_half(
    limit: int, others: int, expected: int
) -> None:
    without = {f"key {number}": Claim(1) for number in range(others)}
    assert kept_free({"a": Claim(1, limit), **without}, "a", limit) == expected


@pytest.mark.parametrize(
    ("held", "key", "expected"),
    [
        pytest.param({"a": 16, "b": 0}, "b", ["a"], id="who has all yields"),
        pytest.param({"a": 16, "b": 0}, "a", [], id="nobody yields to who is over its share"),
        pytest.param({"a": 8, "b": 8}, "b", [], id="nor to who has its share"),
        pytest.param({"a": 6, "b": 10, "c": 0}, "c", ["b", "a"], id="who has most yields first"),
        pytest.param({"a": (12, 4), "b": 4, "c": 0}, "c", ["b", "a"], id="most for its weight"),
        pytest.param({"a": 12, "b": 4, "c": 0}, "c", ["a"], id="who is within its share keeps what it has"),
    ],
)
def test_who_yields_a_place_of_16(held: dict[str, int], key: str, expected: list[str]) -> None:
    assert yielding(claims(**held), key, 16) == expected


def test_with_more_keys_than_places_each_has_at_most_one() -> None:
    crowd = {"a": Claim(1, 2), "b": Claim(1, 1), "c": Claim(1, 1), **{f"{n}": Claim(1) for n in range(9)}}
    assert yielding(crowd, "0", 4) == ["a"]
    assert yielding({**crowd, "a": Claim(1, 1), "d": Claim(1, 1)}, "0", 4) == []


@pytest.mark.parametrize(
    ("held", "waiting", "expected"),
    [
        pytest.param({"a": 3}, ["a", "a"], 0, id="of one key, the first comer"),
        pytest.param({"a": 3, "b": 0}, ["a", "b"], 1, id="the key that has fewest"),
        pytest.param({"a": (4, 4), "b": 2}, ["b", "a"], 1, id="fewest for its weight"),
        pytest.param({"a": 2, "b": 2}, ["b", "a"], 0, id="of equal keys, the first comer"),
        pytest.param({"a": 15, "b": 0}, ["a"], None, id="what is kept free is for others"),
        pytest.param({"a": 15, "b": 0}, ["a", "b"], 1, id="and for those only"),
        pytest.param({"a": 16}, ["a"], None, id="nothing is free"),
    ],
)
def test_who_gets_the_next_of_16_turns(held: dict[str, int], waiting: list[str], expected: int | None) -> None:
    assert next_in_turn(claims(**held), waiting, 16) == expected


def test_who_has_least_for_its_weight_is_next_for_memory() -> None:
    assert least(claims(a=(60, 2), b=40), ["b", "a", "a"]) == 1


def test_a_key_counts_while_it_has_something_and_for_a_minute_after_its_last_request() -> None:
    counted = Counted()
    counted.see(Share("a"), NOW)
    counted.see(Share("b", 5), NOW)
    counted.add("b", 2)
    assert counted.claims(NOW + 59) == {"a": Claim(1), "b": Claim(5, 2)}
    counted.see(Share("a", 3), NOW + 59)
    assert counted.claims(NOW + 118) == {"a": Claim(3), "b": Claim(5, 2)}, "with the weight of its last request"
    assert counted.claims(NOW + 120) == {"b": Claim(5, 2)}
    counted.add("b", -2)
    assert counted.claims(NOW + 120) == {} and counted.held("a") == 0


@pytest.mark.parametrize(
    ("seconds", "weight", "expected"),
    [(0.0, 1, 0), (0.1, 1, 0), (0.11, 1, 1), (0.7, 1, 3), (0.8, 1, 3), (0.9, 1, 4), (10.0, 1, 7), (10.0, 100, 0)],
)
def test_prompts_rank_by_what_their_key_has_had_for_its_weight(seconds: float, weight: int, expected: int) -> None:
    assert rank(Claim(weight, seconds)) == expected


def test_what_a_key_has_had_of_the_computing_fades() -> None:
    computing = Computing()
    computing.see(Share("a"), NOW)
    computing.computed("b", 1.0, NOW)  # its job has ended long ago
    seen = []
    for second in range(1, 41):
        if second <= 15:
            computing.computed("a", 1.0, NOW + second)
        seen.append(rank(computing.claims(NOW + second)["a"]))
    assert seen[:15] == [4, 5, 5, *[6] * 6, *[7] * 6]
    assert seen[15:] == sorted(seen[15:], reverse=True) and seen[-1] == 3


@pytest.mark.parametrize(
    ("waiting", "key", "expected"),
    [
        pytest.param({}, "a", 90, id="of nobody anything is known"),
        pytest.param({"a": 50}, "a", 90, id="a key alone waits for everything"),
        pytest.param({"a": 80, "b": 0}, "b", 0, id="a key without anything waits for nothing"),
        pytest.param({"a": 80, "b": 10}, "b", 20, id="as much of the other key comes before it as of its own"),
        pytest.param({"a": (80, 3), "b": 10}, "b", 40, id="by their weights"),
        pytest.param({"a": 10, "b": 80}, "b", 90, id="but not more than waits"),
    ],
)
def test_how_much_comes_before_something_new(waiting: dict[str, int], key: str, expected: float) -> None:
    assert ahead(claims(**waiting), Share(key), 90) == expected


class Request:
    """A request with a place."""

    def __init__(self, places: Places, key: str, count: int = 1, *, waiting: bool = True, weight: int = 1) -> None:
        self.waiting, self.yielded = waiting, False
        self.place: Place | None = places.take(
            Share(key, weight), count, NOW, waiting=lambda: self.waiting, give_up=self._give_up
        )

    def _give_up(self) -> None:
        self.yielded = True


def test_the_youngest_that_waits_yields_and_nothing_that_has_begun_does() -> None:
    places = Places(8)
    greedy = [Request(places, "a", waiting=number != 7) for number in range(8)]
    first = [Request(places, key) for key in ("b", "c")]
    assert [one.yielded for one in greedy] == [False] * 5 + [True, True, False]
    assert all(one.place for one in first) and (places.held("a"), places.taken) == (6, 8)
    for one in greedy:
        one.waiting = False
    assert Request(places, "d").place is None, "all that the others have has begun"


def test_nobody_yields_for_a_request_that_cannot_have_all_its_places() -> None:
    places = Places(8)
    greedy = [Request(places, "a", waiting=number == 0) for number in range(8)]
    assert Request(places, "b", count=2).place is None
    assert not any(one.yielded for one in greedy)
    assert Request(places, "b").place is not None and greedy[0].yielded


def test_a_place_that_was_yielded_is_given_back_once() -> None:
    places = Places(2)
    first, second = Request(places, "a"), Request(places, "a")
    Request(places, "b")
    assert second.yielded and second.place is not None and first.place is not None
    places.give_back(second.place, NOW)
    assert places.taken == 2
    places.give_back(first.place, NOW)
    assert places.taken == 1


def test_two_keys_that_both_want_more_settle_and_do_not_take_places_from_each_other_for_ever() -> None:
    places = Places(9)
    yielded = []
    requests = {"a": [Request(places, "a") for _ in range(9)], "b": list[Request]()}
    for _ in range(20):
        for key in ("b", "a"):
            requests[key].append(Request(places, key))
        yielded.append(sum(one.yielded for one in (*requests["a"], *requests["b"])))
    assert (places.held("a"), places.held("b")) == (5, 4)
    assert yielded[5:] == [4] * 15


def test_a_request_with_several_answers_yields_them_together() -> None:
    places = Places(16)
    large, small = Request(places, "a", count=12), Request(places, "a", count=4, waiting=False)
    assert Request(places, "b", count=8).place is not None
    assert large.yielded and not small.yielded and places.taken == 12


def test_a_place_may_be_beyond_the_limit_within_the_share_only() -> None:
    places = Places(4)
    taken = [places.enter(Share("a"), NOW) for _ in range(5)]
    assert [place is not None for place in taken] == [True] * 4 + [False]
    assert [places.enter(Share("b"), NOW) is not None for _ in range(3)] == [True, True, False]
    assert (places.taken, places.held("b")) == (6, 2)
