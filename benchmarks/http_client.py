"""What the HTTP client of disagg costs by itself, beside aiohttp: CPU time per streamed event and per small request.

    python -m benchmarks.http_client [--rounds 5]

The server is that of `benchmarks.http_server`, in a process of its own: events of 90 bytes, every 4 ms, on 1 and on 32
streams, and POSTs on one connection, straight after each other. Each client gives its pieces to the same reader of
events; on asyncio's loop and on uvloop's, with TLS and without. One JSON object, microseconds; medians of rounds that
are taken in turn. aiohttp is left out if it is not installed: disagg does not use it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import ssl
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import uvloop

from benchmarks.http_server import EVENTS, STREAMS, server
from disagg.api.event_stream import EventReader
from disagg.config import EngineOptions, Host
from disagg.inference.http.connections import Connections, HostRequest
from disagg.tls.certificate import unchecked_context
from disagg.token import Tokens

TOKEN: Final = "a-token-of-this-benchmark"
REQUESTS: Final = 1000
WAIT_S: Final = 60.0
BODY: Final = b"x" * 2000
LOOPS: Final[dict[str, Callable[[Coroutine[Any, Any, float]], float]]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    clients: dict[str, Callable[[int, bool], Client]] = {"disagg": OwnClient}
    if importlib.util.find_spec("aiohttp") is not None:
        clients["aiohttp"] = AiohttpClient
    found: dict[str, list[float]] = {}
    with server() as (port, _):
        for _ in range(args.rounds):
            for tls in (False, True):
                for loop, run in LOOPS.items():
                    for name, make in clients.items():
                        for what, work in WORKS.items():
                            cost = run(measured(make(port, tls), work))
                            found.setdefault(f"{name}, {loop}{', TLS' if tls else ''}: {what}", []).append(cost)
    medians = {name: round(statistics.median(costs), 1) for name, costs in sorted(found.items())}
    print(json.dumps({"load": round(os.getloadavg()[0], 1), "us": medians}, indent=2))


class Client:
    """A client of the server at this port."""

    def __init__(self, port: int, tls: bool) -> None:
        self.port, self.tls = port, tls

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def stream(self) -> None:
        """Read a stream of events to its end."""
        raise NotImplementedError

    async def post(self) -> None:
        """Send a small request and read its answer."""
        raise NotImplementedError


class OwnClient(Client):
    async def __aenter__(self) -> None:
        self._http = Connections(Tokens(TOKEN))
        url = f"http://127.0.0.1:{self.port}"
        role, engine = ("decode", "simulated") if self.tls else ("whole", "openai")
        self._host = Host("server", "127.0.0.1", (role,), "m", EngineOptions(engine, url=url), self.port)  # type: ignore[arg-type]

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def stream(self) -> None:
        reader = EventReader()

        def take(piece: bytes) -> bool:
            reader.feed(piece)
            exchange.connection.extend(time.monotonic() + WAIT_S)
            return False

        exchange = await self._http.send(HostRequest(self._host, "GET", "/stream"), WAIT_S)
        await self._http.head(exchange, WAIT_S, WAIT_S)
        await exchange.connection.follow(take, time.monotonic() + WAIT_S)
        self._http.release(exchange)

    async def post(self) -> None:
        exchange = await self._http.send(HostRequest(self._host, "POST", "/", BODY), WAIT_S)
        await self._http.head(exchange, WAIT_S, WAIT_S)
        await exchange.content(1 << 20, WAIT_S)
        self._http.release(exchange)


class AiohttpClient(Client):
    async def __aenter__(self) -> None:
        import aiohttp

        context: ssl.SSLContext | bool = unchecked_context() if self.tls else False
        timeout = aiohttp.ClientTimeout(sock_read=WAIT_S)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=timeout)
        self._url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def stream(self) -> None:
        reader = EventReader()
        async with self._http.get(f"{self._url}/stream") as answer:
            async for piece in answer.content.iter_any():
                reader.feed(piece)

    async def post(self) -> None:
        async with self._http.post(self._url, data=BODY) as answer:
            await answer.read()


async def measured(client: Client, work: Callable[[Client], Awaitable[int]]) -> float:
    """Microseconds of this process for each unit of the work."""
    async with client:
        await client.post()
        began = time.process_time()
        count = await work(client)
        return 1e6 * (time.process_time() - began) / count


def events(streams: int) -> Callable[[Client], Awaitable[int]]:
    async def work(client: Client) -> int:
        await asyncio.gather(*(client.stream() for _ in range(streams)))
        return streams * EVENTS

    return work


async def requests(client: Client) -> int:
    for _ in range(REQUESTS):
        await client.post()
    return REQUESTS


WORKS: Final = {**{f"event of {count} streams": events(count) for count in STREAMS}, "request": requests}

if __name__ == "__main__":
    main()
