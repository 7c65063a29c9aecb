"""A model that neither disagg's tests nor `disagg verify` have compared is marked, until one of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.api.status import Evidence, ModelFingerprint
from disagg.config import load
from disagg.errors import FleetError
from disagg.fleet.lifecycle.status.compare import with_remarks
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.verdicts import Verdict, VerifiedEngine, keep, known_verdicts
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
TOGETHER = [DECODE, PREFILL]


def pair(
    architecture: str = "new_type",
    dtype: str = "float32",
    *,
    prefill: Mapping[str, str] = PREFILL.versions,
    decode: Mapping[str, str] = VERSIONS,
) -> Verdict:
    return Verdict(architecture, VerifiedEngine(dtype, prefill), VerifiedEngine(dtype, decode))


EXACT, OTHER = pair(), pair("old_type")
OLD = {"transformers": "5.22.0", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("verdicts", "status", "marked"),
    [
        ([], DECODE, True),
        ([], replace(DECODE, verified=True), False),
        ([EXACT], DECODE, False),
        ([EXACT], PREFILL, False),
        ([pair(prefill=OLD)], PREFILL, True),
        ([pair(prefill=OLD)], DECODE, False),
        ([pair(decode=PREFILL.versions)], DECODE, True),
        ([EXACT], replace(DECODE, versions={}), True),
        ([OTHER], DECODE, True),
        ([OTHER, EXACT], DECODE, False),
        ([pair(dtype="bfloat16")], DECODE, True),
        ([pair(decode={**VERSIONS, "mlx-lm": "0.32.9"})], DECODE, True),
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


@pytest.mark.parametrize(
    ("verdicts", "statuses", "remark"),
    [
        ([EXACT], TOGETHER, ""),
        ([pair(prefill=OLD), pair(decode={"mlx-lm": "0.32.1"})], TOGETHER, "new_type is not verified with prefill-1:"),
        ([pair(prefill=OLD)], [DECODE, replace(PREFILL, versions=OLD)], ""),
        ([pair(prefill=OLD)], TOGETHER, "new_type is not verified with prefill-1:"),
        ([pair(prefill=OLD)], [DECODE, replace(PREFILL, state="failed")], ""),
        ([pair(prefill=OLD)], [DECODE, replace(PREFILL, model="other")], ""),
        ([pair(prefill=OLD)], [DECODE, replace(PREFILL, roles=("whole",))], ""),
    ],
)
def test_a_host_is_verified_with_the_partners_of_which_a_verdict_has_both_ends(
    tmp_path: Path, verdicts: list[Verdict], statuses: list[HostStatus], remark: str
) -> None:
    """Two verdicts, about this host and another partner, and about another host and this partner, say nothing of the
    two."""
    decode, _ = with_remarks(load(write_fleet(tmp_path)), statuses, verdicts)
    assert decode.ok and (remark in decode.why if remark else not decode.why)


def found(*likeliest: int, prompt: str = "a") -> Evidence:
    return Evidence(prompt, 300, likeliest)


@pytest.mark.parametrize(
    ("decode", "prefill", "verdicts", "remark"),
    [
        (found(1, 2, 3, 4), found(1, 2, 3, 4), [], ""),
        (found(1, 2, 3, 4), found(1, 2, 9, 9), [], ""),
        (found(1, 2, 3, 4), found(1, 9, 9, 9), [], "those of prefill-1 in 1 of 4 places"),
        (found(1, 2, 3, 4), found(9, 9, 9, 9), [EXACT], ""),
        (found(1, 2, 3, 4), found(9, 9, 9, 9), [OTHER], "those of prefill-1 in 0 of 4 places"),
        (found(1, 2, 3, 4), found(9, 9, 9, 9, prompt="b"), [], ""),
        (found(1, 2, 3, 4), found(9, 9), [], ""),
        (found(1, 2, 3, 4), None, [], ""),
        (None, found(1, 2, 3, 4), [], ""),
    ],
)
def test_hosts_of_a_model_that_hardly_agree_about_a_text_are_marked_whatever_the_model_type(
    tmp_path: Path, decode: Evidence | None, prefill: Evidence | None, verdicts: list[Verdict], remark: str
) -> None:
    statuses = [replace(DECODE, verified=True, evidence=decode), replace(PREFILL, verified=True, evidence=prefill)]
    remarked, _ = with_remarks(load(write_fleet(tmp_path)), statuses, verdicts)
    assert remarked.ok
    assert remarked.why == (f"after a fixed text its likeliest tokens are {remark}" if remark else "")
    assert remarked.hint == ("disagg verify tiny" if remark else "")


@pytest.mark.parametrize("other", [replace(PREFILL, roles=("decode",)), replace(PREFILL, model="other")])
def test_hosts_of_one_role_or_of_other_models_are_not_compared(tmp_path: Path, other: HostStatus) -> None:
    statuses = [replace(DECODE, verified=True, evidence=found(1, 2)), replace(other, evidence=found(3, 4))]
    assert with_remarks(load(write_fleet(tmp_path)), statuses)[0].why == ""


def test_verdicts_are_kept_once_and_the_oldest_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fleet = load(write_fleet(tmp_path))
    for number in (*range(70), 69):
        keep(fleet, numbered(number))
    found = known_verdicts(state_folder(fleet))
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
    return pair(f"type_{number}")
