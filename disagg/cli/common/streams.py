"""The standard streams as whoever started the command has left them: closed, as `disagg ... <&- >&-` does, or with an
encoding that has few characters."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


def open_closed_streams() -> None:
    """Let those that are closed be empty, or discard what is written: Python has None in their place, and the system
    gives their numbers to the next file or socket, which a program that the command starts would then read or write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - it stays open


def replace_what_has_no_code() -> None:
    """From now on stdout gets a ? for a character that its encoding does not have, such as an arrow. stderr gets an
    escape sequence, which is Python's default there."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
