"""benchmarks/turns.py: the order of what is compared."""

from __future__ import annotations

from benchmarks.turns import turns


def test_every_way_comes_first_second_and_last_equally_often() -> None:
    rounds = [turns(["bare", "server", "transformers"], number) for number in range(3)]
    assert [sorted(names) for names in zip(*rounds, strict=True)] == [["bare", "server", "transformers"]] * 3
    assert turns([], 1) == []
