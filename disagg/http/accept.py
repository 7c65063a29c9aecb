"""Listen and accept connections, without spinning when descriptors run out. Sockets have the options of a server that
is left alone.

asyncio's own accept loop logs one error per place in the backlog when the process has no descriptor left: 39,880 lines
in ten seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

from disagg import logs
from disagg.errors import FleetError, PortInUse

BACKLOG = 512
RETRY_S = 0.5
KEEPALIVE_IDLE_S, KEEPALIVE_PROBE_S, KEEPALIVE_PROBES = 10, 3, 3
UNACKNOWLEDGED_S = 30
"""A caller that acknowledges nothing for this long is gone, e.g. its cable is cut."""


class ListenHints(NamedTuple):
    """What to do about a port that is in use, and about an address that is not this machine's."""

    port: str
    address: str


def listen(address: str, port: int, hints: ListenHints) -> socket.socket:
    """A listening socket. Port 0: any that is free. Raises PortInUse or FleetError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio sets TCP_NODELAY on accepted connections only if the protocol is named; else every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {address} is in use", hints.port) from error
        hint = f"{hints.port}; one over 1023 needs no root" if error.errno == errno.EACCES else hints.address
        raise FleetError(f"cannot listen on {address}:{port}: {error.strerror or error}", hint) from error
    return listener


async def accept(
    listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], free_descriptor: Callable[[], bool]
) -> None:
    """Accept until cancelled. free_descriptor: closes the least useful connection; False if there is none.

    Nothing is awaited between accepting and passing on, as it is in `loop.sock_accept`: cancelled there, a connection
    would be left open without an owner.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            await _readable(listener)
            continue
        except OSError as error:  # no descriptor or memory is left, or the caller has gone already
            freed = free_descriptor()
            logs.event(logging.WARNING, "cannot_accept", reason=str(error), closed_an_idle_connection=freed)
            await asyncio.sleep(0.0 if freed else RETRY_S)
            continue
        try:
            set_options(connection)
            await loop.connect_accepted_socket(make_protocol, connection)
        except OSError:  # the caller has gone
            connection.close()


async def _readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(listener, wake)
    try:
        await ready
    finally:
        loop.remove_reader(listener)


def set_options(connection: socket.socket) -> None:
    """Let the kernel find out that a caller is gone, also while nothing is sent."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _options():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _options() -> list[tuple[int, int]]:
    options = [(socket.TCP_KEEPINTVL, KEEPALIVE_PROBE_S), (socket.TCP_KEEPCNT, KEEPALIVE_PROBES)]
    if sys.platform == "linux":
        return [
            *options,
            (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
            (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000),
        ]
    return [*options, (getattr(socket, "TCP_KEEPALIVE", 0x10), KEEPALIVE_IDLE_S)]  # macOS
