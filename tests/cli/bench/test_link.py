"""`disagg bench link` on four machines behind SSH, whose links are shaped and cut, and on this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.config import load
from disagg.fleet.link.judge import hidden_tokens_per_s
from tests.cli.commandline import run
from tests.simulated import ROW_BYTES, write_simulated
from tests.testbed.bed import Bed


@pytest.fixture
def measured(bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `disagg bench link ARGUMENTS` on the bed; exit code and what it printed."""
    bed.need_links()
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")

    def measure(*arguments: Any) -> tuple[int, str]:
        code = run("--config", path, "bench", "link", *arguments)
        return code, capsys.readouterr().out

    return measure


def test_every_kv_link_is_a_row_within_80_columns(measured: Callable[..., tuple[int, str]]) -> None:
    code, out = measured()
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    # A finding about a link, which a busy machine makes slow, begins "dgx-spark-1 → ".
    rows = [line.split() for line in out.splitlines() if line.startswith("dgx-") and "→" not in line]
    assert [row[:4] for row in rows] == [
        ["dgx-spark-1", "mac-studio-2", "eth0", "10"],
        ["dgx-spark-2", "mac-studio-1", "eth0", "10"],
    ]
    assert "KV per token of qwen3-coder:30b: 4.0 KiB" in out


def test_json_tells_the_rate_the_way_the_round_trip_and_what_the_link_hides(
    measured: Callable[..., tuple[int, str]],
) -> None:
    code, out = measured("--from", "dgx-spark-1", "--json")
    body = json.loads(out)
    (link,) = body["links"]
    assert (code, body["ok"], link["from"], link["to"]) == (0, True, "dgx-spark-1", "mac-studio-2")
    assert link["interface"]["name"] == "eth0" and link["interface"]["speed"] == 10e9
    assert 0 < link["latency_s"] < 1 and link["error"] is None
    expected = hidden_tokens_per_s(link["bits_per_s"], link["kv_bytes_per_token"])
    assert link["kv_bytes_per_token"] > 0 and link["hidden_tokens_per_s"] == pytest.approx(expected)


def test_a_slow_link_is_a_warning_with_the_command_that_mends_it_and_exit_code_0(
    bed: Bed, measured: Callable[..., tuple[int, str]]
) -> None:
    with bed.limited("mac-studio-2", 40):
        code, out = measured("--to", "mac-studio-2")
    said = " ".join(out.split())
    assert code == 0 and "! warning" in out
    assert "far below the 10 Gb/s of eth0" in said and "→ look for errors and drops: disagg exec --host" in said


def test_a_link_that_is_cut_where_kv_goes_is_a_fault_and_hides_no_other(
    bed: Bed, measured: Callable[..., tuple[int, str]]
) -> None:
    bed.hosts["dgx-spark-1"].as_root("ip", "route", "add", "unreachable", "169.254.150.102/32")
    try:
        code, out = measured("--json")
    finally:
        bed.hosts["dgx-spark-1"].as_root("ip", "route", "del", "unreachable", "169.254.150.102/32")
    cut, well = json.loads(out)["links"]
    assert code == 1 and cut["error"]["code"] == "PeerLost" and cut["hidden_tokens_per_s"] is None
    assert well["error"] is None and well["bits_per_s"] > 0


def test_a_host_that_does_not_answer_is_exit_code_4(bed: Bed, measured: Callable[..., tuple[int, str]]) -> None:
    with bed.cut("mac-studio-2"):
        code, out = measured()
    assert code == 4 and "✘ fault" in out and "ssh: mac-studio-2" in out
    assert "dgx-spark-2 mac-studio-1 eth0" in " ".join(out.split()), "the other link was measured"


def test_any_two_hosts_can_be_measured_and_it_says_where_no_kv_goes(measured: Callable[..., tuple[int, str]]) -> None:
    code, out = measured("--from", "dgx-spark-2", "--to", "dgx-spark-1", "--json")
    (link,) = json.loads(out)["links"]
    assert code == 0 and link["bits_per_s"] > 0 and link["hidden_tokens_per_s"] is None
    assert (
        "no KV takes this direction: dgx-spark-2 is prefill of gpt-oss:120b, dgx-spark-1 is prefill"
        in link["findings"][-1]["text"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "nobody"], "has no host nobody"),
        (["--from", "m-decode"], "no KV leaves m-decode"),
        (["--to", "m-prefill"], "no KV reaches m-prefill"),
        (["--from", "m-decode", "--to", "m-decode"], "m-decode has no link to itself"),
    ],
)
def test_hosts_without_such_a_link_are_a_usage_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", write_simulated(tmp_path), "bench", "link", *arguments) == 2
    assert message in capsys.readouterr().err


def test_two_hosts_on_this_machine_are_measured_over_loopback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_simulated(tmp_path)
    assert run("--config", path, "bench", "link", "--json") == 0
    (link,) = json.loads(capsys.readouterr().out)["links"]
    assert load(path).hosts["m-prefill"].simulated and link["kv_bytes_per_token"] == ROW_BYTES
    assert "within one machine" in link["findings"][0]["text"]
