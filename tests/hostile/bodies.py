"""Request bodies by the size of their chunks, pieces and framing, by their rate and their encoding.

    await bodies.check(Port(port, "/api/show", b'{"model": "m"}', key))

Each is sent as its row states, to its end or that of the connection. A server reads it, or refuses it with an answer
that the caller sees.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

PATIENCE_S: Final = 60.0
REFUSED: Final = (400, 401, 403, 413, 431)
SURELY_SEEN: Final = 1 << 20
"""After a refusal a server reads so much of what follows, before it resets the connection of a caller that sends on."""
PROBE: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Body:
    """One body. What is 0 is not so.

    size: bytes of content: JSON that the server accepts, and spaces. chunk: bytes of content in a chunk; 0: with a
    Content-Length. padding: digits in front of the size of each chunk, or of an extension behind it. trailers: bytes
    after the last chunk. piece: bytes that are sent at a time; else many. rate: bytes per second; else as fast as it
    goes. missing: bytes of content that never come. read: whether a server reads it to its end; None: it may.
    """

    name: str
    size: int
    chunk: int = 0
    padding: int = 0
    extension: int = 0
    trailers: int = 0
    piece: int = 0
    rate: float = 0.0
    missing: int = 0
    read: bool | None = False

    @property
    def head(self) -> bytes:
        """The field that states its encoding."""
        return b"Transfer-Encoding: chunked\r\n" if self.chunk else b"Content-Length: %d\r\n" % self.size

    def wire(self, accepted: bytes) -> Iterator[bytes]:
        """Its bytes, as they are sent."""
        content = accepted.ljust(self.size)[: self.size - self.missing]
        framed = b"".join(self._chunks(content)) if self.chunk else content
        step = self.piece or 1 << 16
        for start in range(0, len(framed), step):
            yield framed[start : start + step]

    def _chunks(self, content: bytes) -> Iterator[bytes]:
        extension = b";x=" + b"x" * self.extension if self.extension else b""
        for start in range(0, len(content), self.chunk):
            data = content[start : start + self.chunk]
            yield b"0" * self.padding + b"%x%b\r\n%b\r\n" % (len(data), extension, data)
        if not self.missing:
            yield b"0\r\n" + (b"X: " + b"x" * self.trailers + b"\r\n" if self.trailers else b"") + b"\r\n"


BODIES: Final = (
    Body("one piece", 10_000, read=True),
    Body("one chunk", 10_000, chunk=10_000, read=True),
    Body("chunks of 64 bytes", 500_000, chunk=64, read=True),
    Body("lines of a program", 60_000, chunk=20, read=True),
    Body("packets of the smallest size", 20_000, piece=536, read=True),
    Body("a line that is typed", 300, piece=1, read=True),
    Body("a slow link", 20_000, piece=1_000, rate=200_000, read=True),
    Body("chunks of one byte", 200_000, chunk=1),
    Body("chunks of one byte, slowly", 1_000_000, chunk=1, rate=200_000),
    Body("chunks of ten bytes", 400_000, chunk=10),
    Body("one byte at a time", 10_000, piece=1, read=None),  # a busy server reads several at once
    Body("long extensions", 100_000, chunk=64, extension=200),
    Body("one endless extension", 10, chunk=10, extension=3_000_000),
    Body("sizes with zeros in front", 100_000, chunk=64, padding=200),
    Body("long trailers", 1_000, chunk=1_000, trailers=1_000_000),
    Body("too long, as it states", 3_000_000),
    Body("too long, as it turns out", 3_000_000, chunk=60_000),
)


class Port(NamedTuple):
    """A server, one of its calls with a body that it accepts, and who calls. token: empty for a caller without one.
    tls: else plain HTTP."""

    port: int
    path: str
    accepted: bytes
    token: str = ""
    tls: ssl.SSLContext | None = None


class Answer(NamedTuple):
    """status: 0 if there was none before the connection ended. content: after the head. reset: the connection was
    reset, which a caller that sends all before it reads would see instead of the answer."""

    status: int
    head: bytes
    content: bytes
    reset: bool


async def check(server: Port, chosen: Sequence[Body] = BODIES) -> None:
    """Send these bodies side by side. Each is read or refused as it states, and somebody else is answered meanwhile."""
    sending = [asyncio.ensure_future(send(server, body)) for body in chosen]
    try:
        assert (health := await _answered(server, PROBE)).status == 200, health
        for body, answer in zip(chosen, await asyncio.gather(*sending), strict=True):
            assert answer.status in (*REFUSED, 200), (body, answer)
            assert body.read is None or (answer.status == 200) is body.read, (body, answer)
            assert not answer.reset or body.size + body.trailers + body.extension > SURELY_SEEN, (body, answer)
    finally:
        for one in sending:
            one.cancel()
        await asyncio.wait(sending)


async def send(server: Port, body: Body) -> Answer:
    """The answer to a request with this body, which is read while the body is sent."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % server.path.encode()
    if server.token:
        head += b"Authorization: Bearer %b\r\n" % server.token.encode()
    return await _answered(server, head + body.head + b"\r\n", body)


async def _answered(server: Port, head: bytes, body: Body | None = None) -> Answer:
    """What comes on a new connection until it ends, after these bytes and this body."""
    name = "disagg" if server.tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=server.tls, server_hostname=name)
    sending = asyncio.ensure_future(_send(writer, head, body, server.accepted))
    try:
        async with asyncio.timeout(PATIENCE_S):
            received, reset = await _received(reader)
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        writer.transport.abort()
    found, _, content = received.partition(b"\r\n\r\n")
    return Answer(int(found.split()[1]) if found else 0, found, content, reset)


async def _received(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """All that comes, and whether it ends with a reset."""
    received = bytearray()
    try:
        while data := await reader.read(1 << 16):
            received += data
    except ConnectionError:
        return bytes(received), True
    return bytes(received), False


async def _send(writer: asyncio.StreamWriter, head: bytes, body: Body | None, accepted: bytes) -> None:
    """Until all is sent, or the server has closed the connection."""
    with suppress(ConnectionError):
        writer.write(head)
        for piece in body.wire(accepted) if body else ():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(len(piece) / body.rate if body and body.rate else 0)
