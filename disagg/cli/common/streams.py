"""The standard streams that whoever started the command has closed, as `disagg ... <&- >&-` does."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def open_closed_streams() -> None:
    """Let those that are closed be empty, or discard what is written: Python has None in their place, and the system
    gives their numbers to the next file or socket, which a program that the command starts would then read or write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
