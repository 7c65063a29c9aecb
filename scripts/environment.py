"""Set up a virtual environment: environment.py FOLDER [--say TEXT] [--sees FOLDER] [-- ARGUMENTS OF PIP INSTALL]...

Run it with the Python that the environment is to have; `make` does, and touches FOLDER/.ready afterwards. An
environment with that file is complete: packages are installed into it. Without it a set-up was cut short, and the
environment is made anew: pip cannot repair one that lacks pip or half of a package. --say: printed before the work
begins. --sees: the environment imports the packages of that one too. Each group of arguments is one call of pip.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

# Also an older Python runs this file, to be told that it is too old.
OLDEST = (3, 11)
LARGE_MB = 20.0
_DOWNLOAD = re.compile(r"\s*Downloading (?:\S*/)?(\S+?) \(([\d.]+) (MB|GB)\)")


def main(argv: Sequence[str]) -> int:
    """Make the environment and install. An error is one line on stderr, after pip's own words."""
    words, *installs = split(argv)
    folder = Path(words[0])
    options = {words[place]: words[place + 1] for place in range(1, len(words) - 1, 2)}
    try:
        if refusal := refused(sys.version_info[:2], missing_modules()):
            raise SystemExit(refusal)
        _say(" ".join(options.get("--say", "").split()))
        prepare(folder)
        if "--sees" in options:
            see(folder, Path(options["--sees"]))
        for arguments in installs:
            install(folder, arguments)
    except SystemExit as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the next run begins anew\n")
        return 130
    return 0


def split(argv: Sequence[str]) -> list[list[str]]:
    """The words before the first "--", and each group after one."""
    groups: list[list[str]] = [[]]
    for word in argv:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    return groups


def missing_modules() -> list[str]:
    """What an environment with pip is made with, as far as this Python lacks it. Debian packages it separately."""
    return [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]


def refused(version: tuple[int, int], missing: Sequence[str]) -> str:
    """Why this Python cannot make the environment, and what to do; "" if it can."""
    own, oldest = (".".join(map(str, one)) for one in (version, OLDEST))
    if version < OLDEST:
        return (
            f"{sys.executable} is Python {own}, and {oldest} is the oldest that works: make PYTHON=python{oldest} ..."
        )
    if missing:
        package = f"sudo apt-get install python{own}-venv"
        return f"{sys.executable} has no module {missing[0]}, which Debian and Ubuntu package separately: {package}"
    return ""


def prepare(folder: Path) -> None:
    """An environment with pip, which counts as cut short from now on."""
    stamp, python = folder / ".ready", folder / "bin" / "python"
    complete = stamp.exists() and python.exists()
    stamp.unlink(missing_ok=True)
    if complete:
        return
    if folder.exists():
        _say(f"{folder} is not complete: it is made anew")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], f"{folder} could not be made")


def see(folder: Path, other: Path) -> None:
    """Have the environment in `folder` import the packages of `other` too, after its own."""
    own, others = (Path(sysconfig.get_path("purelib", "venv", {"base": str(one.resolve())})) for one in (folder, other))
    (own / "project.pth").write_text(f"{others}\n", encoding="utf-8")


def install(folder: Path, arguments: Sequence[str]) -> None:
    """One call of pip. Prints the large files when their downloads begin."""
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", *arguments]
    _run(command, "pip could not install the packages, as it says above; correct that and run the same command again")


def _run(command: Sequence[str], failure: str) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            _say(progress(line))
    if process.returncode:
        raise SystemExit(failure)


def progress(line: str) -> str:
    """What is said about a line of pip's; "" for most."""
    if line.startswith("Installing collected packages:"):
        return f"  unpacking {line.count(',') + 1} packages"
    found = _DOWNLOAD.match(line)
    if found is None or float(found[2]) * (1000 if found[3] == "GB" else 1) < LARGE_MB:
        return ""
    return f"  downloading {'-'.join(found[1].split('-')[:2])}: {found[2]} {found[3]}"


def _say(text: str) -> None:
    if text:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
