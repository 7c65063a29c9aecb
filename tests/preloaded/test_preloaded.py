"""tests/preloaded: one caller or process that is killed spoils no other test."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.preloaded import AVAILABLE, RUN_VARIABLE, Preloaded, ProcessEndedError, file_identity, remove_if_same
from tests.preloaded.__main__ import Caller
from tests.values import present


def test_a_socket_that_another_process_has_made_meanwhile_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.touch()
    dead = file_identity(path)
    path.rename(tmp_path / "dead")
    path.touch()
    remove_if_same(path, dead)
    assert path.exists()
    remove_if_same(path, file_identity(path))
    assert not path.exists()
    remove_if_same(path, dead)


def test_a_caller_that_was_killed_ends_its_connection_only() -> None:
    own, theirs = socket.socketpair()
    caller = Caller(own, {})
    theirs.close()  # with unread bytes, so that reading is an error
    assert not caller.answer()
    caller.close()


@pytest.mark.skipif(not AVAILABLE, reason="forks on Linux only")
def test_a_process_that_ended_is_one_clear_error_and_the_next_program_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, f"own-{os.getpid()}")
    preloaded = Preloaded(framework="nothing")
    first = preloaded.start([], os.environ, tmp_path / "log", program="this")
    assert first.wait() == 0
    lost = preloaded.start([], os.environ, tmp_path / "log", program="this")
    launched = present(preloaded._started)
    launched.kill()
    launched.wait()
    with pytest.raises(ProcessEndedError, match=r"tests\.preloaded nothing has ended with exit code -9"):
        lost.wait()
    assert preloaded.start([], os.environ, tmp_path / "log", program="this").wait() == 0
    with pytest.raises(ProcessEndedError, match="has ended"):
        lost.poll()
    preloaded.close()
    present(preloaded._started).wait(60)
