"""What doctor sees on deployed hosts, and what `disagg uninstall` leaves on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.cli.app import main
from tests.fleet.deploy.guests import install_uv
from tests.testbed.bed import Bed


@pytest.fixture
def disagg(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs a command line on hosts that are deployed; exit code and stdout."""
    bed.need_links()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    install_uv(bed)
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    path.write_text('[deploy]\ninstaller = "uv"\n\n' + path.read_text())

    def run(*arguments: Any) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["--config", str(path), *arguments])
        return int(ended.value.code or 0), capsys.readouterr().out

    assert run("deploy", "--yes")[0] == 0
    yield run
    for host in bed.hosts.values():
        for name in (".disagg", ".cache"):
            shutil.rmtree(host.home / name, ignore_errors=True)


def remains(host: Any) -> list[str]:
    """Files below a host's home, but for what makes it a host of the bed."""
    kept = (".ssh", ".local", "guest")
    return sorted(
        str(path.relative_to(host.home))
        for path in host.home.rglob("*")
        if path.is_file() and path.relative_to(host.home).parts[0] not in kept
    )


def test_doctor_sees_environment_token_version_and_that_nothing_serves(
    disagg: Callable[..., tuple[int, str]], bed: Bed
) -> None:
    code, out = disagg("doctor", "--json", "--host", "dgx-spark-1", "--host", "mac-studio-2")
    body = json.loads(out)
    assert code == 0
    for host in body["hosts"]:
        found = {one["check"]: one for one in host["findings"]}
        assert found["python"]["text"].startswith("env ")
        assert found["token"]["text"] == "0600"
        assert found["model"]["level"] == "ok"
        assert found["server"]["hint"] == f"disagg start --host {host['host']}"
    (pair,) = body["pairs"]
    assert {one["check"]: one["level"] for one in pair["findings"]}["model"] == "ok"
    assert "hides" in [one["check"] for one in pair["findings"]]
    assert body["fleet"][0]["text"].startswith("disagg 0.1.0 on 2 hosts")


def test_a_token_that_others_can_read_is_found_and_the_named_command_mends_it(
    disagg: Callable[..., tuple[int, str]], bed: Bed
) -> None:
    token = bed.hosts["dgx-spark-1"].home / ".disagg/hosts/dgx-spark-1/token"
    token.chmod(0o644)

    def finding() -> Any:
        body = json.loads(disagg("doctor", "--json", "--host", "dgx-spark-1")[1])
        return next(one for one in body["hosts"][0]["findings"] if one["check"] == "token")

    assert finding()["level"] == "fault"
    words = finding()["hint"].split()
    assert words[0] == "disagg"
    assert disagg(*words[1:])[0] == 0
    assert finding()["level"] == "ok"


def test_uninstall_leaves_models_and_with_models_nothing(disagg: Callable[..., tuple[int, str]], bed: Bed) -> None:
    assert disagg("uninstall", "--yes")[0] == 0
    for host in bed.hosts.values():
        left = remains(host)
        assert left and [path for path in left if not path.startswith(".disagg/models/")] == []
    assert disagg("deploy", "--yes")[0] == 0
    assert disagg("uninstall", "--yes", "--models")[0] == 0
    for host in bed.hosts.values():
        assert remains(host) == []
        assert not (host.home / ".disagg").exists()


def test_models_that_outlive_their_host_go_with_a_second_uninstall(
    disagg: Callable[..., tuple[int, str]], bed: Bed
) -> None:
    assert disagg("uninstall", "--yes")[0] == 0
    assert disagg("uninstall", "--yes", "--models")[0] == 0
    assert all(remains(host) == [] for host in bed.hosts.values())


def test_a_carried_model_is_listed_as_such_and_can_be_removed(disagg: Callable[..., tuple[int, str]], bed: Bed) -> None:
    code, out = disagg("models", "list", "--json", "--host", "dgx-spark-1")
    (row,) = json.loads(out)["hosts"]
    assert code == 0 and row["state"] == "complete"
    assert disagg("models", "rm", "qwen", "--host", "dgx-spark-1", "--yes")[0] == 0
    assert list((bed.hosts["dgx-spark-1"].home / ".disagg/models/carried").iterdir()) == []
