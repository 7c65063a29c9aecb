"""Work whose output goes to a pipe ends when nobody reads the pipe any more, as for `| head`."""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Coroutine

LOOK_S = 0.5


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
