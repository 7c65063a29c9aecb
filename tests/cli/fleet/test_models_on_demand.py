"""`disagg models` and hosts with several models: what is loaded, loads, unloads and pins, with real keepers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.api.keeper import LoadEvent
from disagg.cli.fleet.models import how_far
from disagg.token import TOKEN_FILE_VARIABLE
from tests.cli.commandline import run
from tests.fleets import RunningFleet

HOST = "decode-1/llama"


@pytest.fixture
def models(kept_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `disagg models`: its exit code, and what it prints."""
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(kept_fleet.folder / "token"))

    def command(*words: str) -> tuple[int, str, str]:
        code = run("--config", kept_fleet.fleet.path, "models", *words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


@pytest.mark.slow
def test_a_model_is_loaded_on_a_host_listed_pinned_and_unloaded(models: Any) -> None:
    code, out, err = models("load", "llama", "--host", "decode-1", "--json")
    assert code == 0, err
    assert json.loads(out)["hosts"][HOST]["state"] == "ready"

    code, out, _ = models("list", "llama", "--json")
    rows = {row["host"]: row for row in json.loads(out)["hosts"]}
    assert code == 0 and set(rows) == {"prefill-1", "prefill-2", "decode-1", "decode-2"}
    assert {name: row["server"] for name, row in rows.items() if name.startswith("decode")} == {
        "decode-1": "up",
        "decode-2": "asleep",
    }
    assert rows["decode-1"]["state"] == "complete" and rows["decode-1"]["kept"]["loads"] == 1
    _, out, _ = models("list", "llama")
    assert "ready" in out and "asleep" in out and max(map(len, out.splitlines())) <= 80

    code, out, _ = models("pin", "llama", "--host", "decode-1", "--json")
    assert code == 0 and json.loads(out)["hosts"][HOST]["pinned"]
    code, out, _ = models("pin", "llama", "--host", "decode-1", "--off")
    assert code == 0 and "llama is no longer pinned: decode-1 (ready)" in out

    code, out, _ = models("unload", "llama", "--host", "decode-1")
    assert code == 0 and "llama is unloaded: decode-1 (asleep)" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("load", "lama"), 'no model "lama"'),
        (("unload", "llama", "--host", "decode-9"), "decode-9"),
        (("rm", "llama", "--host", "decode-1", "--yes"), "folder of your own"),
    ],
)
def test_what_cannot_be_done_is_one_error(models: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = models(*words)
    assert code != 0 and said in " ".join((out + err).split())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"state": "asleep", "position": 2, "left_s": 12.0}, "waiting for 2 loads before it, about 12 s"),
        ({"state": "asleep", "left_s": 3.0}, "waiting, about 3 s"),
        ({"state": "draining", "left_s": 7200.0}, "waiting for memory"),
        ({"state": "loading", "left_s": 3.0}, "about 3 s left"),
        ({"state": "loading", "left_s": 3.0, "read_bytes": 1, "total_bytes": 4}, "1 B of 4 B, about 3 s left"),
        ({"state": "ready"}, "loaded"),
    ],
)
def test_a_load_says_how_far_it_is(fields: dict[str, Any], said: str) -> None:
    assert how_far(LoadEvent(model="m", port=9, **fields)) == said
