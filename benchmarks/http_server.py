"""What the HTTP server of hosts and gateways costs by itself: its CPU time per request and per streamed event.

    python -m benchmarks.http_server [--rounds 5]

A bare ASGI application behind the server, in a process of its own. Requests: POSTs of 2 KB on one connection, straight
after each other, whose body is read. Events: of 90 bytes, every 4 ms, on 1 and on 32 streams. With TLS and without. One
JSON object, microseconds; medians of rounds. In a checkout of an earlier commit, the same file measures its server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import ssl
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import psutil
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.http.server import BoundedServer, ListenHints, listen, run
from disagg.tls.certificate import ServerTLS, unchecked_context

REQUESTS: Final = 3000
EVENTS: Final = 500
EVENT_S: Final = 0.004
EVENT: Final = b"data: " + b"x" * 82 + b"\n\n"
STREAMS: Final = (1, 32)
_POST: Final = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000
_GET: Final = b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    result: dict[str, object] = {"load": round(os.getloadavg()[0], 1)}
    with server() as (port, process):
        for name, context in (("plain", None), ("tls", unchecked_context())):
            costs = [asyncio.run(measured(port, process, context)) for _ in range(args.rounds)]
            result[name] = {what: round(statistics.median(cost[what] for cost in costs), 1) for what in costs[0]}
    print(json.dumps(result, indent=2))


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await Request(scope, receive).body()
    if scope["path"] != "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(EVENTS):
        await asyncio.sleep(EVENT_S)
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body"})


@contextmanager
def server() -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of a server."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


def serve(parent: Connection) -> None:
    listener = listen("127.0.0.1", 0, ListenHints("", ""))
    encryption = Encryption(ServerTLS(lambda: ("a-token-of-this-benchmark",)))
    parent.send(listener.getsockname()[1])
    run(BoundedServer(application, ConnectionBounds(), 1, encryption).serve(sockets=[listener]))


async def measured(port: int, process: psutil.Process, context: ssl.SSLContext | None) -> dict[str, float]:
    """Microseconds of the server's CPU."""
    found = {"request": await cost(process, requests(port, context)) / REQUESTS}
    for streams in STREAMS:
        spent = await cost(process, asyncio.gather(*(stream(port, context) for _ in range(streams))))
        found[f"event of {streams} streams"] = spent / (streams * EVENTS)
    return found


async def cost(process: psutil.Process, work: asyncio.Future[list[None]] | asyncio.Task[None]) -> float:
    before = process.cpu_times()
    await work
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) * 1e6


def requests(port: int, context: ssl.SSLContext | None) -> asyncio.Task[None]:
    async def ask() -> None:
        reader, writer = await connected(port, context)
        for _ in range(REQUESTS):
            writer.write(_POST)
            await reader.readuntil(b"{}")
        writer.close()

    return asyncio.ensure_future(ask())


async def stream(port: int, context: ssl.SSLContext | None) -> None:
    reader, writer = await connected(port, context)
    writer.write(_GET)
    await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


async def connected(port: int, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = "disagg" if context else None
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name, limit=1 << 20)


if __name__ == "__main__":
    main()
