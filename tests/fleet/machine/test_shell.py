"""The scripts by themselves, where what matters is the moment at which they are ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from disagg.fleet.machine.machine import BOOTSTRAP, program, script
from disagg.fleet.machine.upload import packed
from tests.deadlines import wait_until

SLEEP_S = 4321.5
"""Of no other sleep on this machine."""
ENDED_AFTER_FIRST_MV = 'mv() { command mv "$@" || return 1; if [ "$1" = -f ]; then kill -s TERM $$; fi; }\n'


def test_a_folder_that_was_to_be_replaced_is_there_again_where_that_is_broken_off(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/old").touch()
    with packed({"new": b"1"}) as archive:
        argv = [
            "sh",
            "-c",
            ENDED_AFTER_FIRST_MV + script("path.sh", "beside.sh", "put_tree.sh"),
            "sh",
            str(tmp_path / "tree"),
        ]
        done = subprocess.run(argv, input=archive.stream.read(), capture_output=True, timeout=20, check=False)
    assert done.returncode == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["old"]


@pytest.mark.parametrize("sh", ["sh", "bash"])
def test_a_guard_leaves_no_sleep_behind_however_soon_its_client_goes(sh: str) -> None:
    """Each message replaces the sleep that the one before has begun, and the end comes while the last one begins."""
    guarding = program([f"{SLEEP_S}"], script("guard.sh"), takes_input=True)
    argv = [sh, "-c", BOOTSTRAP.replace("/bin/sh", sh)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    for number in range(25):
        with subprocess.Popen(argv, stdin=pipe, stdout=null, stderr=null, start_new_session=True) as guard:
            guard.communicate(guarding + b"live\n" * (number % 5), timeout=20)
    try:  # the last guard has ended; what it has begun may be ending
        wait_until(lambda: not sleeping(), 10, "the last sleep to end")
    finally:
        for one in sleeping():
            one.kill()


def sleeping() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if f"{SLEEP_S}" in (one.info["cmdline"] or ())]
