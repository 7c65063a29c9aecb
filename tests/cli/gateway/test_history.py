"""`disagg history`, read from a file of history that no gateway has open."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from disagg.api.gateway import HistoryEntry
from disagg.cli.gateway.history import remark
from disagg.config import load
from disagg.gateway.watch.history import HistoryBounds, Store, history_path
from tests.cli.commandline import run, write_fleet

OK = HistoryEntry(
    time=time.time(),
    request_id="r1",
    api="openai-chat",
    model="tiny",
    state="ok",
    method="fallback",
    decode_server="tiny-decode",
    prompt_tokens=1234,
    completion_tokens=56,
    ttft=0.25,
    prefill_speed=900.0,
    decode_speed=30.0,
    total_time=2.0,
)
FAILED = msgspec.structs.replace(OK, model="other", state="failed", error="no host answers", error_code="x", ttft=None)
OLD = msgspec.structs.replace(OK, time=time.time() - 7200, request_id="old")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_fleet(tmp_path, ("tiny", "other"))
    store = Store(history_path(load(path)), HistoryBounds())
    store.append([OLD, OK, FAILED])
    store.close()
    return path


def test_the_table_has_figures_hosts_and_what_went_wrong(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("history", "--config", config) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("1,234+56", "250 ms", "30.0", "tiny-decode fallback", "no host answers"):
        assert text in out


def test_why_a_request_failed_stands_in_full_below_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, reason = write_fleet(tmp_path, ("tiny", "other")), "no decode host answers, and no other one is left"
    store = Store(history_path(load(path)), HistoryBounds())
    store.append([OK, msgspec.structs.replace(FAILED, error=reason)])
    store.close()
    assert run("history", "--config", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(f"other: {reason}") and any(line.rstrip().endswith("failed") for line in lines)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_request_that_ended_hosts_is_named_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    path = write_fleet(tmp_path, ("tiny", "other"))
    harmful = {"request_id": "bad-one", "key": "agent", "error": "d1 and d2 ended", "error_code": "request_ended_hosts"}
    store = Store(history_path(load(path)), HistoryBounds())
    store.append([msgspec.structs.replace(FAILED, **harmful)])
    store.close()
    assert run("history", "--config", path) == 0
    assert "d1 and d2 ended: request bad-one of key agent" in " ".join(capsys.readouterr().out.split())


def test_on_a_narrow_terminal_nothing_of_an_answer_is_cut(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run("history", "--config", config) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40 and "…" not in out
    for text in ("1,234+56 tokens", "TTFT 250 ms", "total 2.00 s", "tiny-decode fallback", "no host answers"):
        assert text in " ".join(out.split())


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ""),
        ({"held_tokens": 1200}, " 1,200 held"),
        ({"layers": 24}, " split after 24"),
        ({"held_tokens": 1200, "layers": 24}, " 1,200 held, split after 24"),
        ({"layers": 24, "resumed_at": 2048}, " prefill host failed after 2,048"),
    ],
)
def test_a_prompt_that_both_hosts_computed_says_so(fields: dict[str, int], shown: str) -> None:
    plain = HistoryEntry(time=0.0, request_id="r", api="a", model="m", state="ok", total_time=1.0)
    assert remark(msgspec.structs.replace(plain, **fields)).plain == shown


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        ((), ["r1", "r1", "old"]),
        (("-m", "tiny-alias"), ["r1", "old"]),
        (("--state", "failed"), ["r1"]),
        (("-m", "tiny", "--hours", "1"), ["r1"]),
        (("-n", "1"), ["r1"]),
        (("--state", "cancelled"), []),
    ],
)
def test_filters_as_json(
    config: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], requests: list[str]
) -> None:
    assert run("history", *options, "--json", "--config", config) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [entry["request_id"] for entry in entries] == requests


def test_a_fleet_without_a_history_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("history", "--config", write_fleet(tmp_path)) == 0
    assert "There are no such requests. disagg serve keeps those" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "lines"), [(80, 2), (130, 1)])
def test_the_hosts_of_an_answer_are_never_wrapped(
    columns: int, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 80 columns they stand below the model."""
    monkeypatch.setenv("COLUMNS", str(columns))
    path = write_fleet(tmp_path)
    store = Store(history_path(load(path)), HistoryBounds())
    hosts = {"prefill_server": "dgx-spark-1", "decode_server": "mac-studio-2"}
    store.append([msgspec.structs.replace(OK, method="disaggregated", **hosts)])
    store.close()
    assert run("history", "--config", path) == 0
    out = capsys.readouterr().out
    assert "dgx-spark-1 → mac-studio-2" in out
    assert len(out[out.index("─\n") :].splitlines()) == 1 + lines + 1  # the rule, the answer, the caption
