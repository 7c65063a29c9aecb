"""Requests that a server and a proxy in front of it could read in two ways, and unusual ones that are valid.

    await heads.check(served)

HIDDEN follows each hostile one: a server that takes that for a shorter request than its sender meant answers it, too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.errors import RequestError

PATIENCE_S: Final = 60.0

HIDDEN: Final = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
_POST: Final = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED: Final = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_UPGRADE: Final = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


class Valid(NamedTuple):
    """What a server reads in these bytes: the path and the body of each request."""

    sent: bytes
    read: tuple[tuple[str, bytes], ...]


LENGTHS: Final = (
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
    b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    b"Content-Length: 3, 3\r\n\r\nabc",
    *(
        b"Content-Length: %b\r\n\r\nabc" % value
        for value in (b"+3", b"-3", b"0x3", b"3.0", b"3 3", b"", b"\xb2", b"9" * 30)
    ),
    b"Content-Length : 3\r\n\r\nabc",
    b"Content-Length\t: 3\r\n\r\nabc",
    b"Content-Length:\r\n 3\r\n\r\nabc",
    *(
        b"Transfer-Encoding: %b\r\n\r\n0\r\n\r\n" % value
        for value in (
            b"xchunked",
            b"identity",
            b"gzip, chunked",
            b"chunked, identity",
            b"chunked, chunked",
            b'"chunked"',
        )
    ),
    *(
        b"Transfer-Encoding: %b\r\n\r\n0\r\n\r\n" % value
        for value in (b"chunked;q=1", b"\x0bchunked", b"chunked\x00", b"")
    ),
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    b"X: \nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"X: \rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"X: a\r\n folded\r\n\r\n",
    b"\r\r\n\r\n",
    b" X: a\r\n\r\n",
    b"no colon\r\n\r\n",
    b": no name\r\n\r\n",
    b"X\xe9: a\r\n\r\n",
    b"X: a\x00b\r\n\r\n",
)
"""Fields after a request line and a Host."""

CHUNKS: Final = (
    b"3\nabc\n0\n\n",
    b"3\r\nabc0\r\n\r\n",
    b"3\r\nabcd\r\n0\r\n\r\n",
    b"3\r\nabc\n0\r\n\r\n",
    b"3\rXabc\r\n0\r\n\r\n",
    b"3 \r\nabc\r\n0\r\n\r\n",
    b" 3\r\nabc\r\n0\r\n\r\n",
    b"0x3\r\nabc\r\n0\r\n\r\n",
    b"+3\r\nabc\r\n0\r\n\r\n",
    b"-3\r\nabc\r\n0\r\n\r\n",
    b"3_0\r\nabc\r\n0\r\n\r\n",
    b"\r\nabc\r\n0\r\n\r\n",
    b"g\r\nabc\r\n0\r\n\r\n",
    b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    b"3;x\nabc\r\n0\r\n\r\n",
    b"3;\r\nabc\r\n0\r\n\r\n",
    b'3;x="\r\n"\r\nabc\r\n0\r\n\r\n',
    b"3\r\nabc\r\n0\r\n\n",
    b"3\r\nabc\r\n0\n\r\n",
    b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    b"3\r\nabc\r\n0\r\nX: a\n\r\n",
)
"""Bodies after a head that states chunks."""

TARGETS: Final = (
    b"http://localhost/",
    b"http://example.com/",
    b"http://localhost@example.com/",
    b"https://localhost:443/",
    b"localhost:80",
    b"*",
    b"/a#b",
    b"",
    b"?a",
    b"/\x80",
    b"/\x01",
    b"/a b",
    b"/a\tb",
)

HOSTS: Final = (
    b"localhost#.example.com",
    b"localhost/.example.com",
    b"localhost?.example.com",
    b"localhost\\.example.com",
    b"localhost@example.com",
    b"user:password@localhost",
    b"localhost:80:80",
    b"localhost:http",
    b"localhost:123456",
    b"localhost example.com",
    b"[::1",
    b"::1",
    b"[::1]example.com",
    b"[::1%25lo]",
    b"[localhost]",
    b"b\xfccher.example",
)

LINES: Final = (
    b"GET / HTTP/0.9\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.2\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.10\r\nHost: localhost\r\n\r\n",
    b"GET / http/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1 \r\nHost: localhost\r\n\r\n",
    b"GET\t/\tHTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/1.1\nHost: localhost\n\n",
    b"GET / HTTP/1.1\r\nHost: localhost\n\r\n",
    b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"NO-METHOD / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b" GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x00GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: localhost\r\nHost: example.com\r\n\r\n",
    b"POST / HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: %b\r\n\r\n" % (b"x" * 70_000),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * 200 + b"\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
)

HOSTILE: Final = (
    *(_POST + fields for fields in LENGTHS),
    *(_CHUNKED + chunks for chunks in CHUNKS),
    *(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target for target in TARGETS),
    *(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host for host in HOSTS),
    *LINES,
)
"""What is answered with an error, after which nothing more of its connection is read."""

VALID: Final = (
    Valid(_POST + b"Content-Length: 3\r\n\r\nabc" + HIDDEN, (("/", b"abc"), ("/hidden", b""))),
    Valid(_CHUNKED + b"3\r\nabc\r\n0\r\n\r\n" + HIDDEN, (("/", b"abc"), ("/hidden", b""))),
    Valid(_CHUNKED + b"3;x=y\r\nabc\r\n000\r\nX: a\r\n\r\n" + HIDDEN, (("/", b"abc"), ("/hidden", b""))),
    Valid(
        _CHUNKED + b"4\r\n\r\n\r\n\r\n8\r\n\r\n\r\nGET \r\n0\r\n\r\n" + HIDDEN,
        (("/", b"\r\n\r\n\r\n\r\nGET "), ("/hidden", b"")),
    ),
    Valid(_POST + b"Content-Length: 0\r\n\r\n" + HIDDEN, (("/", b""), ("/hidden", b""))),
    Valid(_POST + b"Content-Length:  3\t \r\n\r\nabc\r\n" + HIDDEN, (("/", b"abc"), ("/hidden", b""))),
    Valid(_POST + b"transfer-encoding:CHUNKED\r\n\r\n0\r\n\r\n" + HIDDEN, (("/", b""), ("/hidden", b""))),
    Valid(
        _POST + _UPGRADE + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN + HIDDEN,
        (("/", HIDDEN), ("/hidden", b"")),
    ),
    Valid(
        _POST + _UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + HIDDEN,
        (("/", b"abc"), ("/hidden", b"")),
    ),
    Valid(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + _UPGRADE + b"\r\n" + HIDDEN, (("/", b""), ("/hidden", b""))),
    Valid(b"\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n\r\n" + HIDDEN, (("/", b""), ("/hidden", b""))),
    Valid(b"GET /%2e?a=http://b HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n" + HIDDEN, (("/.", b""), ("/hidden", b""))),
    Valid(b"GET // HTTP/1.1\r\nHost: example.com.\r\n\r\n" + HIDDEN, (("//", b""), ("/hidden", b""))),
    Valid(b"GET / HTTP/1.1\r\nHost:\r\n\r\n" + HIDDEN, (("/", b""), ("/hidden", b""))),
    Valid(b"GET / HTTP/1.0\r\n\r\n", (("/", b""),)),
    Valid(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", (("/", b""),)),
)


class Recorder:
    """An application that reads every request, and answers with 200."""

    def __init__(self) -> None:
        self.read: dict[int, list[tuple[str, bytes]]] = defaultdict(list)
        """By the port of the caller, the path and the body of each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        except RequestError:
            status = 400
        else:
            self.read[scope["client"][1]].append((scope["path"], body))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


async def check(serving: Callable[[ASGIApp], AbstractAsyncContextManager[int]]) -> None:
    """Send everything to a server, whole and byte by byte, each on a connection of its own."""
    recorder = Recorder()
    async with serving(recorder) as port:
        for sent in HOSTILE:
            for step in (len(sent), 1) if len(sent) < 1_000 else (len(sent),):
                await _refused(recorder, port, sent, step)
        for one in VALID:
            for step in (len(one.sent), 1):
                await _read(recorder, port, one, step)


async def _refused(recorder: Recorder, port: int, sent: bytes, step: int) -> None:
    own, statuses = await _statuses(port, sent + HIDDEN, step)
    assert len(statuses) == 1 and statuses[0] in (400, 431, 501, 505), (sent[:100], step, statuses)
    assert not recorder.read[own], (sent[:100], step, recorder.read[own])


async def _read(recorder: Recorder, port: int, one: Valid, step: int) -> None:
    own, statuses = await _statuses(port, one.sent, step, len(one.read))
    assert statuses == [200] * len(one.read), (one, step, statuses)
    assert tuple(recorder.read[own]) == one.read, (one, step, recorder.read[own])


async def _statuses(port: int, sent: bytes, step: int, answers: int = 0) -> tuple[int, list[int]]:
    """The port of a new connection, and the statuses of so many answers on it, or of all until it ends. step: bytes
    that are sent at a time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses = list[int]()
    try:
        async with asyncio.timeout(PATIENCE_S):
            for start in range(0, len(sent), step):
                writer.write(sent[start : start + step])
                await asyncio.sleep(0)
            while not answers or len(statuses) < answers:
                head = await reader.readuntil(b"\r\n\r\n")
                statuses.append(int(head.split()[1]))
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
    except asyncio.IncompleteReadError as error:
        assert not error.partial, error.partial
    finally:
        writer.transport.abort()
    return writer.get_extra_info("sockname")[1], statuses
