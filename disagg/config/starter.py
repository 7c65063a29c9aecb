"""The hosts.toml that `disagg init` writes, and writing it whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from disagg.config.reader import parse
from disagg.config.validate import build
from disagg.errors import UsageError


def starter() -> str:
    """A commented hosts.toml of one prefill and one decode host."""
    return Path(__file__).with_name("starter.toml").read_text(encoding="utf-8")


def write(text: str, path: Path, force: bool = False) -> None:
    """Write a hosts.toml that has been seen to load. UsageError where the file is there already, without `force`."""
    build(parse(text, str(path)), path)
    refuse_to_overwrite(path, force)
    target = Path(os.path.realpath(path))  # through a link, so that the link stays one
    draft = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}", "give another place with --path") from error
    finally:
        with contextlib.suppress(OSError):  # where all went well it has become the file
            draft.unlink()


def refuse_to_overwrite(path: Path, force: bool) -> None:
    """UsageError for a folder, and for a file that is there already, without `force`."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", f"name the file in it: --path {path / 'hosts.toml'}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists already", "--force overwrites it")
