"""tests/preloaded: whoever finds the socket of a killed process removes that one, and none that has replaced it."""

from __future__ import annotations

from pathlib import Path

from tests.preloaded import file_identity, remove_if_same


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
