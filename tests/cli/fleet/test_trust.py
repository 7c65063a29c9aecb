"""`disagg trust` against real sshds."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commandline import ROOT, run
from tests.deadlines import LONG_S
from tests.testbed.bed import Bed


@pytest.fixture
def config(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    monkeypatch.setenv("DISAGG_CONFIG", str(path))
    return path


@pytest.fixture
def known(bed: Bed) -> Iterator[Path]:
    """known_hosts, put back as it was afterwards."""
    path = bed.home / ".ssh/known_hosts"
    before = path.read_text()
    yield path
    path.write_text(before)


def fingerprint(bed: Bed, name: str) -> str:
    key = bed.hosts[name].folder / "host_key.pub"
    return subprocess.run(["ssh-keygen", "-lf", key], check=True, capture_output=True, text=True).stdout.split()[1]


def test_yes_adds_exactly_what_ssh_needs(
    bed: Bed, config: Path, known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(known.read_text().split("\n"))
    known.write_text("")
    assert run("trust", "--yes") == 0
    assert sorted(known.read_text().split("\n")) == before
    out = capsys.readouterr().out
    for name in bed.hosts:
        assert f"ssh-ed25519 {fingerprint(bed, name)}" in out
    assert run("trust") == 0
    assert capsys.readouterr().out.count("already known") == 4
    assert sorted(known.read_text().split("\n")) == before


def test_without_a_terminal_nothing_is_added(
    bed: Bed, config: Path, known: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known.write_text("")
    assert run("trust", "dgx-spark-1") == 2
    shown = capsys.readouterr()
    assert fingerprint(bed, "dgx-spark-1") in shown.out
    assert "disagg trust --yes dgx-spark-1" in shown.err
    assert known.read_text() == ""


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_at_a_terminal_a_person_decides(bed: Bed, config: Path, known: Path, answer: str, code: int) -> None:
    known.write_text("")
    ended, out = at_a_terminal(f"{answer}\n", "trust", "mac-studio-1")
    assert ended == code
    assert fingerprint(bed, "mac-studio-1") in out and "is it the same? [y/N]" in out
    assert bool(known.read_text()) == (code == 0)


def test_a_no_is_for_that_host_only(bed: Bed, config: Path, known: Path) -> None:
    known.write_text("")
    code, out = at_a_terminal("n\ny\n", "trust", "dgx-spark-1", "mac-studio-1")
    assert code == 1
    assert "not added" in out and "mac-studio-1" in out
    assert len(known.read_text().splitlines()) == 1 and fingerprint(bed, "mac-studio-1") in out


def at_a_terminal(typed: str, *arguments: str) -> tuple[int, str]:
    """The exit code and stdout of `disagg ARGUMENTS` where somebody types this."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "disagg", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}
    ) as process:
        os.close(theirs)
        os.write(ours, typed.encode())
        out, _ = process.communicate(timeout=LONG_S)
        os.close(ours)
    return process.returncode, out


def test_a_fingerprint_is_in_one_piece_at_80_columns(
    bed: Bed, config: Path, known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known.write_text("")
    assert run("trust", "--yes") == 0
    out = capsys.readouterr().out.splitlines()
    assert all(f"  ssh-ed25519 {fingerprint(bed, name)}" in out for name in bed.hosts)
    assert all(len(line) <= 80 for line in out if "SHA256" in line)


def test_a_changed_key_is_refused_and_the_others_are_handled(
    bed: Bed, config: Path, known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = known.read_text().splitlines()
    name = lines[0].split()[0]
    wrong = lines[1].split(maxsplit=1)[1]
    known.write_text(f"{name} {wrong}\n")
    assert run("trust", "--yes") == 4
    shown = capsys.readouterr()
    shown_text = " ".join(shown.err.split())
    assert fingerprint(bed, "dgx-spark-1") in shown_text and fingerprint(bed, "dgx-spark-2") in shown_text
    assert f"ssh-keygen -R '{name}' -f '{known}'" in shown_text
    assert shown.out.count("added to") == 3
    assert known.read_text().startswith(f"{name} {wrong}\n") and known.read_text().count(name) == 1


def test_an_unknown_host_is_a_usage_error(config: Path) -> None:
    assert run("trust", "nobody") == 2


def test_json_shows_the_keys_and_adds_none_without_yes(
    bed: Bed, config: Path, known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known.write_text("")
    assert run("trust", "--host", "dgx-*", "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert [row["host"] for row in body["hosts"]] == ["dgx-spark-1", "dgx-spark-2"] and body["ok"] is False
    for row in body["hosts"]:
        assert [(key["fingerprint"], key["state"]) for key in row["keys"]] == [
            (fingerprint(bed, row["host"]), "not added")
        ]
    assert known.read_text() == ""
    for state in ("added", "known"):
        assert run("trust", "dgx-spark-1", "--yes", "--json") == 0
        assert [key["state"] for key in json.loads(capsys.readouterr().out)["hosts"][0]["keys"]] == [state]


def test_json_has_the_error_of_a_host_beside_the_keys_of_the_others(
    bed: Bed, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.need_links()
    with bed.cut("dgx-spark-2"):
        assert run("trust", "--json") == 4
    rows = {row["host"]: row for row in json.loads(capsys.readouterr().out)["hosts"]}
    assert rows.pop("dgx-spark-2")["error"]["code"] == "HostUnreachable"
    assert all(row["error"] is None and row["keys"][0]["state"] == "known" for row in rows.values())
