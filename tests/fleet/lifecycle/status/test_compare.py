"""Hosts that differ stay healthy, are named with the command that evens them, and make the exit code 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.api.keeper import KeptModel
from disagg.api.status import PendingRelease, SenderAudits
from disagg.config import Fleet, load, served_digest
from disagg.fleet.lifecycle.status.compare import flag_differing, flag_refuted, with_remarks
from disagg.fleet.lifecycle.status.host_status import HostStatus, exit_code
from disagg.version import code_hash
from tests.cli.commandline import write_fleet

NAMES = ("prefill-1", "decode-1")
OLD, NEW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return load(write_fleet(tmp_path, connector="ssh"))


def status(fleet: Fleet, name: str, **changes: Any) -> HostStatus:
    host = fleet.hosts[name]
    here = {"code": code_hash(), "config": served_digest(fleet, host), "tokens": ("3f2a11bc",), "release": "c" * 16}
    return replace(HostStatus(name, host.roles, host.model, host.url, "healthy"), **{**here, **changes})


def judged(fleet: Fleet, *changes: dict[str, Any], rotating: bool = False) -> list[HostStatus]:
    found = [status(fleet, name, **change) for name, change in zip(NAMES, changes, strict=True)]
    statuses = with_remarks(fleet, flag_differing(fleet, found), (), rotating)
    assert all(one.ok for one in statuses)
    return statuses


def pending(code: str, config: str) -> dict[str, Any]:
    return {"pending": PendingRelease("d" * 16, 1_772_373_900.0, code, config)}


def test_hosts_that_are_alike_have_no_remark(fleet: Fleet) -> None:
    statuses = judged(fleet, {}, {})
    assert [one.why for one in statuses] == ["", ""] and exit_code(statuses) == 0


def test_all_of_one_code_that_is_not_here_are_alike(fleet: Fleet) -> None:
    statuses = judged(fleet, {"code": OLD}, {"code": OLD})
    assert {one.why for one in statuses} == {"running other code than here"} and exit_code(statuses) == 0


@pytest.mark.parametrize(
    ("changes", "what", "why", "hint"),
    [
        (
            ({"code": OLD}, {"code": NEW}),
            "code",
            f"hosts run different code: {OLD} on prefill-1; {NEW} on decode-1",
            "disagg deploy && disagg restart",
        ),
        (
            ({"code": NEW}, {"code": OLD, "pending": PendingRelease("d" * 16, 1.0, NEW)}),
            "code",
            f"hosts run different code: {NEW} on prefill-1; {OLD} on decode-1",
            "disagg restart",
        ),
        (
            ({"code": OLD, "pending": PendingRelease("d" * 16, 1.0, NEW)}, {"code": OLD}),
            "code",
            f"hosts will run, when they are restarted, different code: {NEW} on prefill-1; {OLD} on decode-1",
            "disagg deploy && disagg restart",
        ),
        (
            ({"tokens": ("3f2a11bc", "9c04d7e1")}, {}),
            "token",
            "hosts accept different tokens: 3f2a11bc, 9c04d7e1 on prefill-1; 3f2a11bc on decode-1",
            "disagg token rotate",
        ),
    ],
)
def test_hosts_that_differ_are_named_and_so_is_the_command_that_evens_them(
    fleet: Fleet, changes: tuple[dict[str, Any], dict[str, Any]], what: str, why: str, hint: str
) -> None:
    statuses = judged(fleet, *changes)
    assert {(one.why, one.hint, one.differs) for one in statuses} == {(why, hint, (what,))}
    assert exit_code(statuses) == 1


def test_a_host_with_other_settings_than_here_is_named_alone(fleet: Fleet) -> None:
    other, alike = judged(fleet, {"config": "another"}, {})
    assert (other.why, other.differs) == ("it runs other settings than hosts.toml here", ("settings",))
    assert other.hint == "disagg deploy --host prefill-1 && disagg restart --host prefill-1"
    assert (alike.why, exit_code([other, alike])) == ("", 1)


def test_a_pending_release_with_these_settings_needs_a_restart_only(fleet: Fleet) -> None:
    here = served_digest(fleet, fleet.hosts["prefill-1"])
    other, _ = judged(fleet, {"config": "another", **pending(code_hash(), here)}, {})
    assert other.why.startswith("it runs other settings than hosts.toml here; release dddddddd pending since")
    assert other.hint == "disagg restart --host prefill-1" and exit_code([other]) == 1


def test_a_pending_release_with_other_settings_is_named(fleet: Fleet) -> None:
    other, _ = judged(fleet, pending(code_hash(), "another"), {})
    assert other.why.startswith("its pending release dddddddd has other settings than hosts.toml here; release")
    assert other.hint == "disagg deploy --host prefill-1 && disagg restart --host prefill-1" and exit_code([other]) == 1


def test_all_with_the_same_pending_release_are_alike(fleet: Fleet) -> None:
    changes = [pending(NEW, served_digest(fleet, fleet.hosts[name])) for name in NAMES]
    statuses = judged(fleet, *changes)
    assert all(one.why.startswith("release dddddddd pending since") for one in statuses) and exit_code(statuses) == 0


@pytest.mark.parametrize(("tokens", "here"), [(("9c04d7e1", "3f2a11bc"), False), (("3f2a11bc",), True)])
def test_a_rotation_that_is_not_finished_is_told_on_every_host(
    fleet: Fleet, tokens: tuple[str, ...], here: bool
) -> None:
    statuses = judged(fleet, {"tokens": tokens}, {"tokens": tokens}, rotating=here)
    told = ("a rotation of the token is not finished: the one before is still accepted", "disagg token rotate")
    assert {(one.why, one.hint) for one in statuses} == {told} and exit_code(statuses) == 0


def test_two_remarks_are_both_there(fleet: Fleet) -> None:
    statuses = judged(fleet, {"code": OLD, "tokens": ("3f2a11bc", "9c04d7e1")}, {"code": NEW})
    assert statuses[0].differs == ("code", "token")
    assert statuses[0].hint == "disagg deploy && disagg restart; then: disagg token rotate"


def test_a_host_that_is_down_counts_first(fleet: Fleet) -> None:
    statuses = judged(fleet, {"code": OLD}, {"code": NEW})
    assert exit_code([*statuses, replace(statuses[0], state="failed")]) == 3
    assert exit_code([*statuses, replace(statuses[0], state="unreachable")]) == 4


def test_a_prefill_host_whose_last_kv_was_refuted_is_named_and_nobody_is_down(fleet: Fleet) -> None:
    right, wrong = SenderAudits(accepted=9, verdict="accepted"), SenderAudits(accepted=5, refuted=2, verdict="refuted")
    for found, why in (
        (right, ""),
        (wrong, "the KV that it sends is wrong: decode-1 refuted it 2 times"),
        (SenderAudits(refuted=1, verdict="refuted"), "the KV that it sends is wrong: decode-1 refuted it once"),
    ):
        prefill, decode = flag_refuted(judged(fleet, {}, {"senders": {"prefill-1": found, "elsewhere": wrong}}))
        assert (prefill.why, prefill.hint) == (why, "disagg verify tiny" if why else "")
        assert decode.why == "" and exit_code([prefill, decode]) == 0


def test_models_that_cannot_be_loaded_or_are_not_there_are_remarks_with_the_command_that_mends_them(
    fleet: Fleet,
) -> None:
    silent = "its process has given no sign of life for 12 s"
    kept = (
        KeptModel(model="oss", state="failed", port=8100, reason="its process ended"),
        KeptModel(model="qwen", state="absent", port=8101, reason="2 files are missing"),
        KeptModel(model="tiny", state="asleep", port=8102),
        KeptModel(model="hung", state="ready", port=8103, reason=silent),
    )
    statuses = judged(fleet, {"models": kept}, {})
    assert statuses[0].why == (
        "oss could not be loaded: its process ended; the files of qwen are not there: 2 files are missing; "
        f"hung: {silent}"
    )
    assert statuses[0].hint == (
        "disagg models load 'oss' --host prefill-1; then: disagg models pull 'qwen' --host prefill-1; "
        "then: disagg models unload --force 'hung' --host prefill-1"
    )
    assert exit_code(statuses) == 0
