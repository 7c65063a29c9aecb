"""scripts/environment.py: how `make` sets up its environments."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import environment
from tests.deadlines import LONG_S

ROOT = Path(__file__).parents[1]


def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "environment.py"), *map(str, words)]
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=LONG_S, env={**os.environ, **own}
    )


def wheel(folder: Path) -> Path:
    """A package `tiny` of one module."""
    info = "tiny-1.0.dist-info"
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_a_set_up_that_was_cut_short_is_made_anew_and_a_complete_one_is_kept(tmp_path: Path) -> None:
    folder, package = tmp_path / "of a clone" / ".venv", wheel(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=LONG_S)
    (folder / "half").touch()

    done = run(folder, "--say", "What is installed,\t how large it is", "--", "--no-index", package)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == f"What is installed, how large it is\n{folder} is not complete: it is made anew\n  unpacking 1 packages\n"
    )
    assert not (folder / "half").exists()
    subprocess.run([folder / "bin" / "python", "-c", "import tiny"], check=True, timeout=LONG_S)

    (folder / ".ready").touch()
    (folder / "kept").touch()
    failed = run(folder, "--", "--no-index", "no-such-package-as-this")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: pip could not install the packages")
    assert (folder / "kept").exists() and not (folder / ".ready").exists()


def test_an_environment_sees_the_packages_of_another(tmp_path: Path) -> None:
    for name in ("one", "other"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True, timeout=LONG_S)
        (tmp_path / name / ".ready").touch()
    next((tmp_path / "other").glob("lib/python*/site-packages")).joinpath("seen.py").touch()
    assert run(tmp_path / "one", "--sees", tmp_path / "other").returncode == 0
    subprocess.run([tmp_path / "one" / "bin" / "python", "-c", "import seen"], check=True, timeout=LONG_S)


@pytest.mark.parametrize(
    ("version", "missing", "says"),
    [
        ((3, 10), [], "is Python 3.10, and 3.11 is the oldest that works: make PYTHON=python3.11 ..."),
        ((3, 10), ["ensurepip"], "is Python 3.10, and 3.11 is the oldest that works: make PYTHON=python3.11 ..."),
        (
            (3, 13),
            ["ensurepip"],
            "has no module ensurepip, which Debian and Ubuntu package separately: sudo apt-get install python3.13-venv",
        ),
    ],
)
def test_a_python_that_cannot_make_it_is_told_before_anything_is_made(
    version: tuple[int, int], missing: Sequence[str], says: str
) -> None:
    assert environment.refused(version, missing) == f"{sys.executable} {says}"


def test_a_refusal_is_one_line_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "missing_modules", lambda: ["ensurepip"])
    assert environment.main([str(tmp_path / ".venv"), "--say", "Installing", "--", "tiny"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    assert not (tmp_path / ".venv").exists()


def test_make_without_python_is_one_line(tmp_path: Path) -> None:
    argv = ["make", "-s", "-C", str(ROOT), f"VENV={tmp_path}/venv", "PYTHON=no-such-python", f"{tmp_path}/venv/.ready"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no no-such-python on PATH: install Python 3.11 or newer\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("  Downloading torch-2.13.0-linux.whl (526.6 MB)\n", "  downloading torch-2.13.0: 526.6 MB"),
        ("  Downloading https://index/p/big-1.0-py3-none-any.whl (1.2 GB)\n", "  downloading big-1.0: 1.2 GB"),
        ("  Downloading idna-3.whl (70 kB)\n", ""),
        ("  Downloading small-3.whl (3.4 MB)\n", ""),
        ("Installing collected packages: a, b, c\n", "  unpacking 3 packages"),
        ("Collecting torch\n", ""),
    ],
)  # fmt: skip
def test_progress_names_large_downloads(line: str, says: str) -> None:
    assert environment.progress(line) == says
