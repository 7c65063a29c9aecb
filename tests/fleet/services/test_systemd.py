"""The unit as text, and as systemd itself reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.services.systemd import command, quoted, unit

HOSTILE = ["a b", 'say "hi"', "it's", "50%", "%h", "$HOME ${PATH}", "back\\slash", "a;b", "#c", "tab\tnew\nline", "é"]


def verify(folder: Path, text: str) -> str:
    """What `systemd-analyze verify` says about a unit; nothing where it is clean."""
    file = folder / "disagg-h.service"
    file.write_text(text)
    tool = shutil.which("systemd-analyze")
    if tool is None:  # a machine without systemd: the text is what is left to look at
        return ""
    argv = [tool, "verify", "--user", "--man=no", str(file)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, env={"XDG_RUNTIME_DIR": "/tmp"}
    )
    return "\n".join(line for line in done.stderr.splitlines() if "disagg-h" in line)


def exec_start(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("ExecStart="))


def test_the_unit_is_clean(tmp_path: Path) -> None:
    assert verify(tmp_path, unit("h", "/bin/true", 252)) == ""


def test_a_fault_would_be_seen(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        return
    assert "Unknown key" in verify(tmp_path, unit("h", "/bin/true", 252).replace("KillMode=", "KilMode="))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_path_of_any_name_is_one_word_and_nothing_else(tmp_path: Path, name: str) -> None:
    text = unit("h", f"/home/{name}/run", 252)
    assert verify(tmp_path, text) == ""
    assert len(text.splitlines()) == len(unit("h", "/x", 252).splitlines()), "no line was forged"


def test_quoting_leaves_systemd_nothing_to_expand() -> None:
    assert quoted('a "b" %h $X \\ \n') == '"a \\"b\\" %%h $$X \\\\ \\n"'
    assert exec_start(unit("h", "/home/a b/run", 252)) == 'ExecStart=/bin/sh "/home/a b/run"'


def test_growing_back_off_where_systemd_knows_it() -> None:
    assert "RestartSteps" not in unit("h", "/x", 252)
    assert "RestartSteps=6\nRestartMaxDelaySec=60\n" in unit("h", "/x", 255)


LATE_SYSTEMCTL = """\
#!/bin/sh
# A manager that answers from the third time on.
echo x >>"$CALLS"
[ "$(wc -l <"$CALLS")" -gt 2 ] || { echo 'Failed to connect to bus' >&2; exit 1; }
"""


def test_a_manager_that_linger_has_just_started_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text(LATE_SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    enable = command(HostPaths("/home/u", "h"), "enable")
    argv = ["sh", "-c", enable.script, "sh", *enable.argv]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_restarts_for_ever() -> None:
    text = unit("h", "/x", 255)
    assert "Restart=always\n" in text and "StartLimitIntervalSec=0\n" in text and "WantedBy=default.target" in text
