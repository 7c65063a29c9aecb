"""When the shared folder of the kernel's sockets is closed, without a jail: only root of a user namespace can mount."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from grader.sandbox import jail


def failing(code: int) -> object:
    def read_only(target: Path) -> None:
        raise OSError(code, "no")

    return read_only


def test_a_folder_with_a_file_that_is_open_for_writing_is_closed_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel makes the file READY; for a moment it is open, and the kernel was killed for it in 3 of 100 starts."""
    monkeypatch.setattr(jail, "read_only", failing(errno.EBUSY))
    assert not jail.closed(tmp_path)
    monkeypatch.setattr(jail, "read_only", lambda target: None)
    assert jail.closed(tmp_path)


def test_any_other_failure_to_close_it_ends_the_jail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jail, "read_only", failing(errno.EPERM))
    with pytest.raises(OSError, match="no"):
        jail.closed(tmp_path)
