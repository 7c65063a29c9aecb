"""How a command lives with what has started it: signals, a pipe that nobody reads any more, streams that are closed or
have few characters."""

from __future__ import annotations

import asyncio
import codecs
import io
import os
import select
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

INTERRUPTED: Final = 130
"""The exit code of a command that Ctrl-C has ended."""
LOOK_S = 0.5
_SIGNS: Final = {"✔": "+", "✘": "x", "·": "-"}
"""Characters that an encoding may lack, and that must stay apart -> in place of them."""


@contextmanager
def terminating() -> Iterator[None]:
    """Let SIGTERM and a closed terminal interrupt as Ctrl-C does; the exit code is 128 + the signal's number.

    A SIGHUP that is ignored, as under nohup, stays ignored. A Ctrl-C that is ignored, as by a script's background job,
    stays so, too, but SIGTERM ends that command.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            raise KeyboardInterrupt
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


async def while_stdout_is_read(work: Coroutine[object, object, object]) -> None:
    """Run this to its end. Raises BrokenPipeError, and cancels it, once stdout is a pipe without a reader."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
            require_reader()
    finally:
        task.cancel()
        await asyncio.wait((task,))
    task.result()


def require_reader() -> None:
    """BrokenPipeError if stdout is a pipe that nobody reads any more."""
    if has_no_reader(_stdout()):
        raise BrokenPipeError


def has_no_reader(descriptor: int | None) -> bool:
    """Whether this is the end of a pipe or a socket whose other end is closed. None: no file."""
    if descriptor is None:
        return False
    look = select.poll()
    look.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0))


def _stdout() -> int | None:
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by something that is no file
        return None


def open_closed_streams() -> None:
    """Let those that are closed be empty, or discard what is written: Python has None in their place, and the system
    gives their numbers to the next file or socket, which a program that the command starts would then read or write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - it stays open


def replace_what_has_no_code() -> None:
    """Have stdout get a sign of ASCII, or a ?, from now on for a character that its encoding does not have, such as an
    arrow. stderr gets an escape sequence, which is Python's default there."""
    # In a locale of ASCII the default is "surrogateescape", which fails at such a character as "strict" does.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error("disagg.signs", _sign)
        sys.stdout.reconfigure(errors="disagg.signs")


def _sign(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SIGNS.get(one, "?") for one in error.object[error.start : error.end]), error.end
