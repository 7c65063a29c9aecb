"""Run a program on a machine that prints {"port": N} once it listens, while the caller connects to that port."""

from __future__ import annotations

import contextvars
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread

from disagg.errors import FleetError
from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import Machine

OnLine = Callable[[str], None]
"""Called with every line that a program prints."""

_KILL_S = 10.0


@contextmanager
def listening(
    machine: Machine, run: Callable[[OnLine], object], *, start_timeout: float, end_timeout: float = 0.0
) -> Iterator[int]:
    """Within, the program runs in a background thread; yields its port.

    run: runs the program on `machine` to its end, with the given `on_line`; what it raises before the port is printed
    is raised here. end_timeout: seconds that the program may take to end by itself after the block. Later, or if the
    block raises, it is killed by closing the machine, which connects again when it is used again. Raises FleetError
    if no port is printed within `start_timeout` seconds.
    """
    news: SimpleQueue[int | BaseException] = SimpleQueue()

    def on_line(line: str) -> None:
        if (port := _port(line)) is not None:
            news.put(port)

    def work() -> None:
        try:
            run(on_line)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits for the port
            news.put(error)
        else:
            news.put(FleetError(f"{machine.name}: the program ended before it listened on a port"))

    context = contextvars.copy_context()  # so that an interruption of the caller reaches the thread
    thread = Thread(target=context.run, args=(work,), name=f"listen on {machine.name}", daemon=True)
    thread.start()
    patience = 0.0
    try:
        yield _first(machine, news, start_timeout)
        patience = end_timeout
    finally:
        try:
            thread.join(patience)
        finally:  # also if the wait is interrupted
            if thread.is_alive():
                machine.close()
                thread.join(_KILL_S)


def _first(machine: Machine, news: SimpleQueue[int | BaseException], timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        interruption.check()
        try:
            port = news.get(timeout=interruption.POLL_S)
        except Empty:
            continue
        if isinstance(port, BaseException):
            raise port
        return port
    message = f"{machine.name}: the program listens on no port after {timeout:g} s"
    raise FleetError(message, f"disagg ssh {machine.name}")


def _port(line: str) -> int | None:
    try:
        body = json.loads(line)
    except ValueError:
        return None
    port = body.get("port") if isinstance(body, dict) else None
    return port if isinstance(port, int) else None
