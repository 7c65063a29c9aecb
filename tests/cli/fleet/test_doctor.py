from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.commandline import run
from tests.testbed.bed import Bed


def test_doctor_shows_each_host_its_links_and_a_verdict_within_80_columns(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.need_links()
    bed.need_bare_hosts()
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    code = run("--config", path, "doctor", "--host", "dgx-spark-1")
    out = capsys.readouterr().out
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("dgx-spark-1  169.254.150.103  prefill  qwen3-coder:30b ──")
    assert "→ disagg deploy --host dgx-spark-1" in out
    assert "KV links  prefill → decode" in out
    assert re.search(r"\d+ warnings? on 1 host", out)


def test_doctor_json_is_one_object_and_nothing_else(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.need_links()
    bed.need_bare_hosts()
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    with bed.cut("mac-studio-2"):
        code = run("--config", path, "doctor", "--json")
    body = json.loads(capsys.readouterr().out)
    assert code == 4 and body["ok"] is False
    assert {one["host"]: one["error"]["code"] if one["error"] else None for one in body["hosts"]} == {
        "dgx-spark-1": None,
        "dgx-spark-2": None,
        "mac-studio-1": None,
        "mac-studio-2": "HostUnreachable",
    }
    assert body["pairs"][0]["link"] is None and body["pairs"][1]["link"]["bits_per_s"] > 0


def test_a_host_that_there_is_not_is_a_usage_error(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.need_bare_hosts()
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    assert run("--config", path, "doctor", "--host", "nobody") == 2
