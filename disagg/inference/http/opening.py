"""Opens a connection to a host: looks its name up, connects, and has it prove that it is of the fleet."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from disagg.config import Host
from disagg.errors import ServerNotRunning, ServerRefused, ServerSilent, ServerUnavailable
from disagg.inference.http.connection import READ_BYTES, HostConnection
from disagg.tls.certificate import unproven

Address = tuple[str, int]


class Opener:
    """Opens connections, on one event loop. asyncio connects; only its lookup of names is not used: it runs in a pool,
    whose threads a program waits for at its end."""

    def __init__(self) -> None:
        self._lookups: dict[Address, asyncio.Future[list[Address]]] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))

    async def ours(self, host: Host, seconds: float, token: str) -> HostConnection:
        """A connection to a server that has proven that it has the fleet's token, which nothing is sent to before."""
        connection = await self._open(host, seconds, lambda: HostConnection(self._buffer, token), {})
        try:
            await connection.secured(seconds)
        except ssl.SSLError as error:
            raise unproven(error, f"{host.name} ({host.url})") from error
        except TimeoutError as error:
            connection.close()
            raise ServerSilent(f"{host.name} ({host.url}) did not answer in time", "run `disagg status`") from error
        except OSError as error:
            raise ServerUnavailable(f"{host.name} ({host.url}): {error}", "run `disagg status`") from error
        except BaseException:  # also a cancellation: nobody else has the connection yet
            connection.close()
            raise
        return connection

    async def whole(self, host: Host, seconds: float) -> HostConnection:
        tls = {"ssl": _tls_context(), "server_hostname": host.address} if urlsplit(host.url).scheme == "https" else {}
        return await self._open(host, seconds, lambda: HostConnection(self._buffer), tls)

    async def _open(
        self, host: Host, seconds: float, make: Callable[[], HostConnection], tls: Mapping[str, Any]
    ) -> HostConnection:
        """Connect to the first address of the host that accepts, in so many seconds for each."""
        loop, errors = asyncio.get_running_loop(), list[Exception]()
        try:
            async with asyncio.timeout(seconds):
                found = await self._addresses(host)
            for address in found:
                try:
                    async with asyncio.timeout(seconds):
                        _, connection = await loop.create_connection(make, *address, **tls)
                    return connection
                except OSError as error:  # TimeoutError is one
                    errors.append(error)
        except OSError as error:  # the name is unknown
            errors.append(error)
        raise _unreachable(host, errors) from errors[-1]

    async def _addresses(self, host: Host) -> list[Address]:
        """The addresses of a host: one, unless hosts.toml has a name for it."""
        address = host.address, host.port
        with suppress(ValueError):
            ip_address(host.address)
            return [address]
        if (lookup := self._lookups.get(address)) is None:
            self._lookups[address] = lookup = _looked_up(address)
            lookup.add_done_callback(lambda _: self._lookups.pop(address))
        return await asyncio.shield(lookup)


def _unreachable(host: Host, errors: Sequence[Exception]) -> ServerUnavailable:
    """What these failures of all its addresses say about a host."""
    if broken := [error for error in errors if isinstance(error, ssl.SSLError)]:
        reason = getattr(broken[-1], "verify_message", "") or broken[-1].reason
        return ServerRefused(
            f"no TLS connection to {host.name} ({host.url}): {reason}",
            "correct its URL in hosts.toml, or add its certificate to those that this machine trusts: $SSL_CERT_FILE",
        )
    refused = all(isinstance(error, ConnectionRefusedError) for error in errors)
    return (ServerNotRunning if refused else ServerUnavailable)(
        f"no server answers at {host.url} ({host.name})",
        "start that server; disagg does not manage it"
        if host.whole
        else "run `disagg status`; `disagg start` starts what is stopped",
    )


@cache
def _tls_context() -> ssl.SSLContext:
    """With the certificates that this machine trusts. Reading them takes 20 ms."""
    return ssl.create_default_context()


def _looked_up(address: Address) -> asyncio.Future[list[Address]]:
    """The addresses of a name. Not by the event loop, which would not end before the lookup does."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[list[Address]] = loop.create_future()

    def settle(found: list[Address] | Exception) -> None:
        if isinstance(found, Exception):
            result.set_exception(found)
            result.exception()  # nobody may wait for it any more
        else:
            result.set_result(found)

    def look_up() -> None:
        found: list[Address] | Exception
        try:
            infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys((str(one[0]), int(one[1])) for *_, one in infos))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            found = error
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=look_up, name=f"look up {address[0]}", daemon=True).start()
    return result
