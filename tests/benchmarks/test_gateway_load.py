"""The verdict on memory of the load run."""

from __future__ import annotations

import pytest

from benchmarks.gateway_load import MEMORY_BOUND, growth


@pytest.mark.parametrize(
    ("looks", "holds"),
    [
        ([50, 90, 99, 100, 100, 100, 100, 100], True),  # it settles
        ([100, 100, 100, 100, 100, 101, 100, 100], True),
        ([100, 101, 102, 103, 104, 105, 106, 107], False),
        ([100, 100, 100, 100, 100, 100, 100, 120], False),
        ([None, None, 100, 100, 100, 99], True),  # it was killed in the first half
    ],
)
def test_memory_holds_if_it_does_not_grow_in_the_last_half(looks: list[float | None], holds: bool) -> None:
    found = growth(looks)
    assert found is not None and (found <= MEMORY_BOUND) is holds


def test_too_few_looks_tell_nothing() -> None:
    assert growth([100.0, 101.0, 102.0]) is None
