from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commandline import run, write_simulated_fleet
from tests.testbed.bed import HOSTS_TOML, Bed


def test_list_shows_every_host_within_80_columns(bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bed.need_links()
    bed.need_bare_hosts()
    assert run("--config", HOSTS_TOML, "models", "list") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("absent") == 4 and "Qwen/Qwen3-Coder-30B-A3B-Instruct" in out


def test_pull_on_bare_hosts_says_to_deploy_them_first(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.need_links()
    bed.need_bare_hosts()
    assert run("--config", HOSTS_TOML, "models", "pull", "gpt-oss") == 1
    out = capsys.readouterr().out
    assert out.count("failed") == 2 and "disagg deploy --host dgx-spark-2" in out


def test_a_host_that_is_cut_off_keeps_no_other_from_being_listed(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.need_links()
    bed.need_bare_hosts()
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    with bed.cut("mac-studio-2"):
        assert run("--config", path, "models", "list", "--json") == 4
    body = json.loads(capsys.readouterr().out)
    assert list(body["errors"]) == ["mac-studio-2"]
    assert [one["host"] for one in body["hosts"]] == ["dgx-spark-1", "dgx-spark-2", "mac-studio-1"]


def test_rm_needs_a_model_and_a_confirmation(bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    assert run("--config", path, "models", "rm", "--yes") == 2
    assert "which model?" in capsys.readouterr().err
    assert run("--config", path, "models", "rm", "qwen") == 2
    assert "disagg models rm qwen --yes" in capsys.readouterr().err
    assert run("--config", path, "models", "rm", "qwen", "--host", "mac-studio-2") == 2
    assert "disagg models rm qwen --host mac-studio-2 --yes" in capsys.readouterr().err
    assert run("--config", path, "models", "rm", "qwem", "--host", "mac-studio-2") == 2
    assert "no model" in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_those_there_are(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    assert run("--config", path, "models", "pull", "llama") == 2
    assert "it has qwen3-coder:30b" in capsys.readouterr().err


def test_rm_on_one_host_asks_that_machine_alone(bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bed.need_links()
    bed.need_bare_hosts()
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    with bed.cut("mac-studio-2"), bed.cut("dgx-spark-1"):
        assert run("--config", path, "models", "rm", "--host", "mac-studio-1", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["errors"] == {}


@pytest.mark.parametrize(("options", "which"), [((), "no host"), (("--host", "decode-1"), "none of these hosts of ")])
def test_simulated_hosts_have_no_model_to_pull(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], which: str
) -> None:
    assert run("models", "pull", *options, "--config", write_simulated_fleet(tmp_path)) == 2
    written = capsys.readouterr().err
    assert written.startswith(f"error: {which}") and "all are simulated, or gateways" in written
