"""Ports of the loopback for servers that tests start. No two test processes are given the same one.

A port that the operating system names may be bound by another process before the server that it is meant for. So each
process locks a block of ports below those that the operating system gives out, and goes round in it.
"""

from __future__ import annotations

import fcntl
import itertools
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO

FIRST = 11_000
BLOCK = 250
BLOCKS = 80
_locks: list[IO[bytes]] = []
"""Held until the process ends."""


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens now."""
    mine = (next(_block()) for _ in range(BLOCK))
    ports = list(itertools.islice(filter(_is_free, mine), count))
    assert len(ports) == count, f"of {BLOCK} ports, {len(ports)} are free"
    return ports


def free_range(count: int) -> range:
    """So many of them in a row."""
    ports: list[int] = []
    for port in (next(_block()) for _ in range(2 * BLOCK)):
        if not _is_free(port):
            ports.clear()
            continue
        if ports and port != ports[-1] + 1:
            ports.clear()
        ports.append(port)
        if len(ports) == count:
            return range(ports[0], port + 1)
    raise AssertionError(f"of {BLOCK} ports, no {count} in a row are free")


@cache
def _block() -> Iterator[int]:
    """The ports of the first block that no other process has, again and again."""
    folder = Path(tempfile.gettempdir()) / "disagg-test-ports"
    folder.mkdir(exist_ok=True)
    for first in range(FIRST, FIRST + BLOCK * BLOCKS, BLOCK):
        lock = (folder / str(first)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            _locks.append(lock)
            return itertools.cycle(range(first, first + BLOCK))
    raise AssertionError(f"{BLOCKS} processes have a block of ports each")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
