"""The home folders of users of this machine."""

from __future__ import annotations

from pathlib import Path

from disagg.errors import ConfigError


def home() -> Path:
    """That of this program's user. ConfigError if there is none, as in some containers."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError("this user has no home folder", "set HOME to a folder that this user may write") from error


def expanded(path: str) -> Path:
    """A path that may begin with `~` or `~user`. ConfigError if that user has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this user has no home folder here", "write the path out") from error
