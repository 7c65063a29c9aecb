"""The scripts by themselves, where what matters is the moment at which they are ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

from disagg.fleet.machine import shell
from disagg.fleet.machine.tree import packed

ENDED_AFTER_FIRST_MV = 'mv() { command mv "$@" || return 1; if [ "$1" = -f ]; then kill -s TERM $$; fi; }\n'


def test_a_folder_that_was_to_be_replaced_is_there_again_where_that_is_broken_off(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/old").touch()
    with packed({"new": b"1"}) as archive:
        argv = ["sh", "-c", ENDED_AFTER_FIRST_MV + shell.PUT_TREE, "sh", str(tmp_path / "tree")]
        done = subprocess.run(argv, input=archive.stream.read(), capture_output=True, timeout=20, check=False)
    assert done.returncode == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["old"]
