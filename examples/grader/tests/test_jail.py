"""When the shared folder of the kernel's sockets is closed, without a jail: only root of a user namespace can mount."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from grader.sandbox import jail, run


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


def test_a_machine_without_user_namespaces_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class System:
        def unshare(self, flags: int) -> int:
            return -1

    (tmp_path / "jail.json").write_text(json.dumps({}))
    monkeypatch.setattr(jail, "libc", System())
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EPERM)
    monkeypatch.setattr(sys, "argv", ["jail.py", str(tmp_path / "jail.json")])
    with pytest.raises(SystemExit, match=r"^jail: this machine allows no user namespaces \(.*not permitted\): sysctl"):
        jail.main()


def test_of_what_the_kernel_said_the_last_line_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("Traceback (most recent call last):\n  File 'x'\njail: no room\n\n")
    assert run.last_line(log) == "jail: no room"
    log.write_text("")
    assert run.last_line(log) == ""
