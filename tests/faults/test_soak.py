from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.faults.process import Held
from tests.faults.soak import SETTLE_READINGS, settled


def _held(resident: int) -> Held:
    return Held({"main": 1}, 3, 4, resident)


@pytest.mark.parametrize(
    ("readings", "last"),
    [
        pytest.param([(300, 350), (300, 350)], (300, 350), id="still"),
        pytest.param([(300, 350), (300, 340), (300, 330), (301, 330), (200, 200)], (301, 330), id="one shrinks"),
        pytest.param([(999 - n, 350) for n in range(99)], (999 - SETTLE_READINGS, 350), id="one shrinks for ever"),
    ],
)
async def test_memory_is_read_once_it_does_not_shrink_any_more(
    readings: list[tuple[int, int]], last: tuple[int, int]
) -> None:
    left = iter(readings)

    def held() -> Mapping[str, Held]:
        return dict(zip(("decode-1", "decode-2"), map(_held, next(left)), strict=True))

    async def pause(seconds: float) -> None:
        assert seconds > 0

    assert [one.resident for one in (await settled(held, pause)).values()] == list(last)
