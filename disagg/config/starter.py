"""The hosts.toml that `disagg init` writes."""

from __future__ import annotations

import os
from pathlib import Path

from disagg.config.toml.reader import parse
from disagg.config.validate import build
from disagg.errors import UsageError
from disagg.files import replace_file


def starter() -> str:
    """A commented hosts.toml of one prefill and one decode host."""
    return Path(__file__).with_name("starter.toml").read_text(encoding="utf-8")


def write(text: str, path: Path, force: bool = False) -> None:
    """Write a hosts.toml after checking that it loads. Raises UsageError if the file exists, unless `force`."""
    build(parse(text, str(path)), path)
    refuse_to_overwrite(path, force)
    try:
        replace_file(path, text.encode(), mode=0o666)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}", "give another file with --path") from error


def refuse_to_overwrite(path: Path, force: bool) -> None:
    """Raises UsageError for a folder, and for a file that exists, unless `force`."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", f"name the file in it: --path {path / 'hosts.toml'}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists already", "--force overwrites it")
