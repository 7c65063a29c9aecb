from __future__ import annotations

from pathlib import Path

import pytest

from disagg.errors import FleetError
from disagg.fleet.rollout.gate import RecordedAnswer, RecordedToken
from disagg.fleet.rollout.progress import RecordedPhase, RecordFile, RolloutRecord, phase


@pytest.mark.parametrize(
    ("before", "runs", "verdict", "expected"),
    [
        ("old", "old", None, "before"),
        ("old", "", None, "before"),
        ("old", "new", None, "new"),
        ("old", "new", "passed", "passed"),
        ("old", "old", "passed", "before"),
        ("old", "new", "failed", "failed"),
        ("old", "", "failed", "failed"),
        ("old", "old", "failed", "back"),
        ("old", "old", "back", "back"),
        ("old", "new", "back", "failed"),
        ("old", "", "stuck", "stuck"),
        ("old", "old", "stuck", "back"),
        ("", "", "stuck", "stuck"),
        ("", "", None, "before"),
    ],
)
def test_a_hosts_phase_follows_from_what_runs_there(
    before: str, runs: str, verdict: RecordedPhase | None, expected: str
) -> None:
    assert phase("new", before, runs, verdict) == expected


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "state" / "rollout.json")
    assert file.read().target == {}
    answers = {"m": RecordedAnswer("a", (RecordedToken(1, -0.5, ((1, -0.5), (2, -1.0))),))}
    record = RolloutRecord({"a": "new"}, {"a": "old"}, {"a": "pending"}, answers, {"a": "passed"})
    file.write(record)
    assert file.read() == record
    file.remove()
    assert file.read() == RolloutRecord({}, {})


def test_a_damaged_record_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    path.write_text("{")
    with pytest.raises(FleetError) as error:
        RecordFile(path).read()
    assert str(path) in error.value.message and f"rm {path}" in error.value.hint


def test_a_rollout_goes_on_only_to_the_same_releases() -> None:
    record = RolloutRecord({"a": "new", "b": "new"}, {})
    assert record.continued_by({"a": "new", "b": "new", "c": "newer"})
    assert not record.continued_by({"a": "new"})
    assert not record.continued_by({"a": "newer", "b": "new"})
    assert RolloutRecord({}, {}).continued_by({"a": "new"})
