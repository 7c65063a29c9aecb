"""The server of hosts and gateways, with every request of tests/hostile/heads.py, and with damaged ones."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from urllib.parse import unquote

import h11

from disagg.http.protocol import ConnectionBounds, Encryption
from tests.hostile import heads
from tests.hostile.heads import HIDDEN, HOSTILE, PATIENCE_S, VALID, Recorder
from tests.http.served import served

ROUNDS = 300
PARTS = (
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\t", b"\x00", b"\xff", b":", b";", b",", b"0", b"3", b"x", b"chunked"),
    *(b"Content-Length: 3\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: localhost\r\n"),
    *(b"Connection: close\r\n", b"HTTP/1.0", b"0\r\n\r\n", b"3\r\nabc\r\n", b"GET /hidden HTTP/1.1\r\n"),
)


async def test_a_request_has_one_reading_or_is_refused_and_nothing_is_hidden_in_it() -> None:
    await heads.check(served)


async def test_what_is_read_of_damaged_requests_is_what_another_parser_reads() -> None:
    """h11 may read less of them: it accepts no empty line before a request, for example."""
    chance, recorder = random.Random(7), Recorder()
    valid = [one.sent for one in VALID]
    hostile = [sent + HIDDEN for sent in HOSTILE if len(sent) < 1_000]
    async with served(recorder, Encryption(), ConnectionBounds(unproven_per_address=ROUNDS)) as port:
        for _ in range(ROUNDS):
            sent = damaged(chance.choice(chance.choice((valid, hostile))), chance)
            own = await closed(port, sent)
            both = list(zip(recorder.read[own], read_by_h11(sent), strict=False))
            assert all(ours == theirs for ours, theirs in both), (sent, both)


def damaged(sent: bytes, chance: random.Random) -> bytes:
    """With something inserted, removed, replaced or repeated."""
    data = bytearray(sent)
    for _ in range(chance.randint(1, 3)):
        at, other = chance.randrange(len(data)), chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at:at] = chance.choice(PARTS)
            case 1:
                del data[at : at + chance.randint(1, 6)]
            case 2:
                data[at : at + 1] = chance.choice(PARTS)
            case _:
                data[at:at] = data[other : other + 40]
    return bytes(data)


async def closed(port: int, sent: bytes) -> int:
    """The port of a new connection, which has sent this and ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            await reader.read()
    writer.transport.abort()
    return int(writer.get_extra_info("sockname")[1])


def read_by_h11(sent: bytes) -> list[tuple[str, bytes]]:
    """The path and the body of each request."""
    connection, read, body = h11.Connection(h11.SERVER, 1 << 17), list[tuple[str, bytes]](), b""
    connection.receive_data(sent)
    path = ""
    with suppress(h11.RemoteProtocolError, h11.LocalProtocolError):
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                path, body = unquote(event.target.partition(b"?")[0].decode("ascii")), b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                read.append((path, body))
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            else:
                break
    return read
