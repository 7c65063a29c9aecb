"""Files that are written in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disagg.files import create_file, replace_file
from tests.values import no_space


def test_a_file_is_replaced_through_a_link_and_is_private(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    replace_file(link, b"new")
    assert link.is_symlink() and file.read_bytes() == b"new" and file.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_file_that_exists_is_not_created_again(tmp_path: Path) -> None:
    create_file(tmp_path / "file", b"first")
    create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first" and len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        replace_file(tmp_path / "pipe", b"new")
    assert (tmp_path / "pipe").is_fifo()
