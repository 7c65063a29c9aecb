"""disagg/kv/repeated.py: the first warning at once, the next ones as a number."""

import pytest

from disagg.kv.receive.repeated import RepeatedWarning


@pytest.mark.parametrize(
    ("times", "written"),
    [
        ([0], ["0"]),
        ([0, 1, 2], ["0"]),
        ([0, 20], ["0", "20"]),
        ([0, 1, 2, 10], ["0", "3 more doors were shut within 10 s; the last: 10"]),
        ([0, 1, 30], ["0", "2 more doors were shut within 10 s; the last: 30"]),
        ([0, 1, 10, 11, 19], ["0", "2 more doors were shut within 10 s; the last: 10"]),
    ],
)
def test_warnings_become_one_line_per_interval(times: list[float], written: list[str]) -> None:
    lines: list[str] = []
    warning = RepeatedWarning("doors were shut", lines.append, interval_s=10)
    for now in times:
        warning.add(f"{now:g}", now)
    assert lines == written


def test_the_number_of_the_last_ones_is_written_when_it_is_due_without_another_warning() -> None:
    lines: list[str] = []
    warning = RepeatedWarning("doors were shut", lines.append, interval_s=10)
    for now in (0, 1, 2):
        warning.add(f"{now:g}", now)
    warning.flush(9)
    assert lines == ["0"]
    warning.flush(11)
    warning.flush(30)
    assert lines == ["0", "2 more doors were shut within 10 s; the last: 2"]


def test_a_flood_writes_a_bounded_number_of_lines() -> None:
    lines: list[str] = []
    warning = RepeatedWarning("doors were shut", lines.append, interval_s=10)
    for i in range(100_000):
        warning.add("x", i / 1000)
    assert len(lines) <= 11
