"""Values that a type checker does not see as tests do, and what fails."""

from __future__ import annotations

import errno
import io
import os
from typing import NoReturn, TypeVar

from rich.console import Console

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value, which must not be None."""
    assert value is not None
    return value


def of_type(value: object, kind: type[T]) -> T:
    """The value, which must be of that type."""
    assert isinstance(value, kind)
    return value


def printed(console: Console) -> str:
    """What was printed on a console whose file is a StringIO."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def no_space(descriptor: int) -> NoReturn:
    """An os.fsync on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
