"""Scripts of steps by themselves, where what matters is what another deployment does meanwhile."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from disagg.fleet.machine.machine import script
from tests.deadlines import LONG_S, wait_until
from tests.programs import needs

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
    argv = [
        "sh",
        "-c",
        script("environment.sh"),
        "sh",
        str(build),
        str(final),
        str(tmp_path / "spec"),
        "3.12",
        str(uv),
        "0",
    ]
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


BLOCKED_UV = """\
#!/bin/sh
# Installs once the file `go` is there, or another one builds, too.
case $1 in
    venv)
        for target; do :; done
        echo venv >>"$HERE/uv.log"
        mkdir -p "$target/bin"
        : >"$target/bin/python"
        chmod 755 "$target/bin/python" ;;
    pip) until test -f "$HERE/go" || [ "$(wc -l <"$HERE/uv.log")" -gt 1 ]; do sleep 0.02; done ;;
esac
"""


def building(folder: Path, host: str) -> subprocess.Popen[str]:
    """A host's deployment builds the environment that it shares with others of its machine."""
    spec = folder / host / "spec"
    spec.mkdir(parents=True)
    words = (folder / host / "build", folder / "envs/0123456789abcdef", spec, "3.12", folder / "uv", "0")
    return subprocess.Popen(
        ["sh", "-c", script("environment.sh"), "sh", *map(str, words)],
        env={"PATH": "/usr/bin:/bin", "HERE": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


@needs("ps")
@pytest.mark.slow
def test_hosts_of_one_machine_build_their_environment_once(tmp_path: Path) -> None:
    (tmp_path / "uv").write_text(BLOCKED_UV)
    (tmp_path / "uv").chmod(0o755)
    with building(tmp_path, "a") as first:
        wait_until((tmp_path / "uv.log").exists, LONG_S, "the first to build")
        with building(tmp_path, "b") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"process {first.pid} builds it for another host of this machine\n"
            (tmp_path / "go").touch()
            assert (first.wait(LONG_S), second.wait(LONG_S)) == (0, 0)
    assert (tmp_path / "uv.log").read_text().split() == ["venv"]
    assert [path.name for path in (tmp_path / "envs").iterdir()] == ["0123456789abcdef"]


@pytest.mark.parametrize("reused", [False, True])
def test_the_environment_of_a_builder_that_was_killed_is_built_by_the_next(tmp_path: Path, reused: bool) -> None:
    (tmp_path / "uv").write_text(BLOCKED_UV)
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "go").touch()
    (tmp_path / "envs").mkdir()
    with subprocess.Popen(["sleep", "1000"]) as later:  # has the pid of the one that was killed
        try:
            if not reused:
                later.kill()
                later.wait()
            (tmp_path / "envs/0123456789abcdef.building").symlink_to(str(later.pid))
            with building(tmp_path, "a") as builder:
                assert builder.wait(LONG_S) == 0
        finally:
            later.kill()
    assert [path.name for path in (tmp_path / "envs").iterdir()] == ["0123456789abcdef"]
