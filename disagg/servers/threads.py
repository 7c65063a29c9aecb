"""Work that takes long, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def on_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` on a daemon thread and return its result.

    A stopping process does not wait for it: loading a model takes minutes, and stopping it loses nothing. If the
    caller is cancelled, the thread runs on and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(end: Callable[[], None]) -> None:
        if not future.done():
            end()

    def run() -> None:
        try:
            end = partial(future.set_result, work())
        except BaseException as failure:  # noqa: BLE001 - it is raised where the future is awaited
            end = partial(future.set_exception, failure)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, end)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
