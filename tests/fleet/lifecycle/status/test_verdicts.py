"""A model that neither disagg's tests nor `disagg verify` have compared is marked, until one of them has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from disagg.api.status import ModelFingerprint
from disagg.config import load
from disagg.errors import FleetError
from disagg.fleet.lifecycle.status.comparison import with_remarks
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.verdicts import Verdict, keep, kept
from disagg.token import state_folder
from tests.cli.commandline import write_fleet

VERSIONS = {"mlx-lm": "0.32.2", "transformers": "5.23.0", "mlx": "0.32.4"}
DECODE = HostStatus(
    "decode-1",
    ("decode",),
    "tiny",
    "",
    "healthy",
    versions=VERSIONS,
    fingerprint=ModelFingerprint("new_type", 640, "", "", "", ""),
    verified=False,
)
PREFILL = replace(DECODE, host="prefill-1", roles=("prefill",), versions={"transformers": "5.23.0", "torch": "2.13.0"})
EXACT = Verdict("new_type", "float32", VERSIONS)
OTHER = Verdict("old_type", "float32", VERSIONS)


@pytest.mark.parametrize(
    ("verdicts", "status", "marked"),
    [
        ([], DECODE, True),
        ([], replace(DECODE, verified=True), False),
        ([EXACT], DECODE, False),
        ([EXACT], PREFILL, False),
        ([OTHER], DECODE, True),
        ([OTHER, EXACT], DECODE, False),
        ([Verdict("new_type", "bfloat16", VERSIONS)], DECODE, True),
        ([Verdict("new_type", "float32", {**VERSIONS, "mlx-lm": "0.32.9"})], DECODE, True),
    ],
)
def test_a_verdict_is_about_one_model_type_and_the_versions_that_run(
    tmp_path: Path, verdicts: list[Verdict], status: HostStatus, marked: bool
) -> None:
    (remarked,) = with_remarks(load(write_fleet(tmp_path)), [status], verdicts)
    assert remarked.ok
    assert ("new_type is not verified" in remarked.why, remarked.hint) == (
        marked,
        "disagg verify tiny" if marked else "",
    )


def test_verdicts_are_kept_once_and_the_oldest_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fleet = load(write_fleet(tmp_path))
    for number in (*range(70), 69):
        keep(fleet, numbered(number))
    found = kept(state_folder(fleet))
    assert len(found) == 64
    assert found[-1] == numbered(69)


def test_a_state_folder_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(FleetError, match=r"verified\.json"):
        keep(load(write_fleet(tmp_path)), EXACT)


def numbered(number: int) -> Verdict:
    return Verdict(f"type_{number}", "float32", VERSIONS)
