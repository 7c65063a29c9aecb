"""demo.sh, with made-up programs: it stops the fleet that it has started, and no other."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

DISAGG = """#!/bin/sh
echo "$*" >>"{calls}"
case $1 in status) cat "{status}"; exit {code} ;; serve) exec sleep 60 ;; esac
"""


@pytest.mark.parametrize(
    ("states", "code", "stopped"),
    [
        (["not running", "not running"], 3, True),
        (["healthy", "healthy"], 0, False),
        (["healthy", "healthy"], 1, False),  # hosts differ
        (["not running", "loading"], 3, False),
    ],
)
def test_a_fleet_of_which_anything_ran_before_is_left_running(
    states: list[str], code: int, stopped: bool, tmp_path: Path
) -> None:
    calls, status = tmp_path / "calls", tmp_path / "status"
    status.write_text(json.dumps({"hosts": [{"host": "a", "state": state} for state in states]}, indent=2))
    place = tmp_path / "examples/grader"
    for folder in (tmp_path / ".venv/bin", place / ".venv/bin"):
        folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "demo.sh", place)
    programs = {
        tmp_path / ".venv/bin/disagg": DISAGG.format(calls=calls, status=status, code=code),
        place / ".venv/bin/python": "#!/bin/sh\n",  # the page, which ends at once
    }
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    subprocess.run([place / "demo.sh"], check=True, capture_output=True, timeout=60)
    assert ("stop" in calls.read_text().splitlines()) == stopped
