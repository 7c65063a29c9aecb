"""Scripts of steps by themselves, where what matters is what another deployment does meanwhile."""

from __future__ import annotations

import subprocess
from pathlib import Path

from disagg.fleet.deploy.scripts import ENVIRONMENT

QUICKER_UV = """\
#!/bin/sh
# While this one installs, another host of the machine finishes the same environment.
case $1 in
    venv) for target; do :; done; mkdir -p "$target/bin"; : >"$target/bin/python"; chmod 755 "$target/bin/python" ;;
    pip) mkdir -p "$FINAL/bin"; cp "$4" "$FINAL/bin/python"; : >"$FINAL/.complete"; : >"$FINAL/in-use" ;;
esac
"""


def test_an_environment_that_another_host_finished_meanwhile_is_left_alone(tmp_path: Path) -> None:
    uv, build, final = tmp_path / "uv", tmp_path / "build", tmp_path / "envs/0123456789abcdef"
    uv.write_text(QUICKER_UV)
    uv.chmod(0o755)
    (tmp_path / "spec").mkdir()
    argv = ["sh", "-c", ENVIRONMENT, "sh", str(build), str(final), str(tmp_path / "spec"), "3.12", str(uv), "0"]
    done = subprocess.run(
        argv,
        env={"PATH": "/usr/bin:/bin", "FINAL": str(final)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (final / "in-use").exists() and not build.exists()
