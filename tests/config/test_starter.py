"""The starter file, and writing a hosts.toml whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import load
from disagg.config.starter import starter, write
from disagg.errors import ConfigError, UsageError


def test_the_starter_loads_and_is_commented(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    write(starter(), path)
    fleet = load(path)
    assert [host.roles for host in fleet.hosts.values()] == [("prefill",), ("decode",)]
    assert starter().count("#") > 10


def test_every_line_that_the_starter_comments_out_may_be_used(tmp_path: Path) -> None:
    switched_on = "\n".join(
        line.removeprefix("# ") if " = " in line and line.startswith("# ") else line for line in starter().split("\n")
    )
    path = tmp_path / "hosts.toml"
    write(switched_on, path)
    fleet = load(path)
    assert fleet.token_file is not None
    assert fleet.hosts["prefill-1"].python == "/opt/torch/bin/python3"
    assert fleet.hosts["prefill-1"].engine.quantization == "int8"
    assert fleet.hosts["decode-1"].data_address == "10.1.0.2"


def test_a_file_that_is_there_is_kept_without_force(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already") as caught:
        write(starter(), path)
    assert "--force" in caught.value.hint
    assert path.read_text() == "mine"
    write(starter(), path, force=True)
    assert path.read_text() == starter()


def test_a_link_stays_a_link_and_one_that_leads_nowhere_counts_as_a_file(tmp_path: Path) -> None:
    link = tmp_path / "hosts.toml"
    link.symlink_to(tmp_path / "real.toml")
    with pytest.raises(UsageError, match="exists already"):
        write(starter(), link)
    write(starter(), link, force=True)
    assert link.is_symlink()
    assert (tmp_path / "real.toml").read_text() == starter()


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        write(starter(), tmp_path, force=True)


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write(starter(), tmp_path / parent / "hosts.toml")


def test_text_that_would_not_load_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write("[fleet]\n", tmp_path / "hosts.toml")
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_left_in_the_folder(tmp_path: Path) -> None:
    write(starter(), tmp_path / "hosts.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.toml"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text("mine")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write(starter(), path, force=True)
    assert [found.name for found in tmp_path.iterdir()] == ["hosts.toml"]
    assert path.read_text() == "mine"
