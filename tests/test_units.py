"""Quantities as text."""

from __future__ import annotations

import pytest

from disagg import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (128 << 30, "128 GiB"),
        (9 << 39, "4.5 TiB"),
        (None, "–"),
    ],
)
def test_sizes(value: int | None, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.000042, "0.042 ms"),
        (0.0008, "0.8 ms"),
        (0.001, "1.0 ms"),
        (0.042, "42 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (120, "120 s"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "1 s"), (44.1, "45 s"), (90, "2 min"), (3600, "60 min"), (9000, "2.5 h")]
)
def test_estimates(value: float, text: str) -> None:
    assert units.estimate(value) == text


def test_counts_speeds_and_uptimes() -> None:
    assert [units.counted(count, "host") for count in (0, 1, 1024)] == ["0 hosts", "1 host", "1,024 hosts"]
    assert [units.speed(v) for v in (None, 12.34, 1234.5)] == ["–", "12.3 tok/s", "1,234 tok/s"]
    assert [units.uptime(v) for v in (5, 300, 12000, 360000)] == ["5s", "5m", "3h 20m", "4d 4h"]
