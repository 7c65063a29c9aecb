"""SIGTERM and SIGHUP end a command the way Ctrl-C does, so that it releases its locks and stops what it started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130
"""The exit code of a command that Ctrl-C has ended."""


@contextmanager
def terminating() -> Iterator[None]:
    """Let SIGTERM and a closed terminal interrupt as Ctrl-C does; the exit code is 128 + the signal's number.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        interrupted = isinstance(error, KeyboardInterrupt) or error.code == INTERRUPTED
        if received and interrupted:
            sys.exit(128 + received[0])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C within the block, which is bounded in time and must complete."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
