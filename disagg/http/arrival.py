"""How a request may arrive: its head has one reading, its body one end, and both come in a bounded number of pieces.

What a request costs before it is read is work per piece, not per byte: bodies in chunks of one byte kept h11 busy for
43 s. The pieces of a slow client that means well are packets, of at least 536 bytes whatever its link, or what a
program writes at a time: a few thousand small ones are free.

A request that a proxy in front of this server could read in another way is refused: its body could hide a second one.
llhttp, with which httptools parses, refuses most of that; what is checked here is what it lets through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import httptools

_EMPTY_LINE: Final = b"\r\n\r\n"
_BEGINNINGS: Final = (_EMPTY_LINE[:3], _EMPTY_LINE[:2], _EMPTY_LINE[:1])
_ANY_HEAD: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
MAX_HEAD_BYTES: Final = 64 << 10
MAX_FIELDS: Final = 128
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?", re.ASCII)
Fields = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values."""


@dataclass(frozen=True, slots=True)
class ArrivalBounds:
    """How a request may arrive.

    pieces: reads of the connection and chunks of the body, of whatever size; each further one must have brought
    `piece_bytes` on average. framing: bytes that are neither head nor body, such as the sizes and extensions of chunks,
    trailers and what TLS adds to a record; besides, as many as head and body have.
    """

    pieces: int = 4096
    piece_bytes: int = 64
    framing: int = 64 << 10


BOUNDS: Final = ArrivalBounds()


@dataclass(slots=True)
class Arrival:
    """What has arrived of one request. content: bytes of its head and its body."""

    pieces: int = 0
    content: int = 0
    framing: int = 0

    def check(self, bounds: ArrivalBounds = BOUNDS) -> None:
        """Raises Refused if it arrives in another way than it may."""
        if self.pieces > bounds.pieces + self.content // bounds.piece_bytes:
            raise Refused(
                400, f"the request arrives in too many pieces: send {bounds.piece_bytes} bytes at a time or more"
            )
        if self.framing > bounds.framing + self.content:
            raise Refused(400, "the request has too many bytes around its body: send larger chunks or TLS records")


class ArrivingBody:
    """Finds the end of a body. on_part: is called with its bytes as they come.

    The parser of the head would take the body of a request that offers an upgrade, such as Java's client does, for what
    follows the request. So a body in chunks has a parser of its own, which skips trailers.
    """

    def __init__(self, framing: Framing, on_part: Callable[[bytes], None]) -> None:
        self.on_body = on_part  # as httptools calls it
        self._left = framing.length
        self._chunks = httptools.HttpRequestParser(self) if framing.chunked else None
        self.complete = not (framing.chunked or framing.length)
        if self._chunks is not None:
            self._chunks.feed_data(_ANY_HEAD)

    def end(self, data: bytes, start: int) -> int:
        """The index up to which the bytes from `start` may belong to this body."""
        return end_of_lines(data, start) if self._chunks is not None else min(len(data), start + self._left)

    def feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        if self._chunks is not None:
            self._chunks.feed_data(data)
            return
        self._left -= len(data)
        self.complete = not self._left
        self.on_body(data)

    def on_message_complete(self) -> None:
        """Called by httptools after the last chunk."""
        self.complete = True


def end_of_lines(data: bytes, start: int) -> int:
    """The index up to which to parse what consists of lines, so that nothing of a next request is parsed: after an
    empty line, with which heads and bodies in chunks end, or before what may be the beginning of one."""
    found = data.find(_EMPTY_LINE, start)
    if found >= 0:
        return found + len(_EMPTY_LINE)
    return len(data) - next((len(one) for one in _BEGINNINGS if data.endswith(one, start)), 0)


class Refused(Exception):
    """A request that is read no further, and is answered with this HTTP status. Its text is one line, in which nothing
    of the request is."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Framing(NamedTuple):
    """Where the body ends: after its last chunk, or after so many bytes."""

    chunked: bool = False
    length: int = 0


def checked(target: bytes, version: str, fields: Fields) -> Framing:
    """How the body of a request with this head is framed. Raises Refused."""
    if version not in ("1.0", "1.1"):
        raise Refused(505, "this server speaks HTTP/1.1 and HTTP/1.0")
    if not target.startswith(b"/") or b"#" in target:
        raise Refused(400, "the target of a request is a path, without scheme, host or fragment")
    _check_host(_values(fields, b"host"), version)
    return _framing(_values(fields, b"content-length"), _values(fields, b"transfer-encoding"), version)


def host_name(host: str) -> str | None:
    """The name or address in the value of a Host header, in lower case and without brackets. None if it is not one: a
    parser of URLs finds `localhost` in `localhost#.example.com`."""
    found = _HOST.fullmatch(host)
    return found["name"].strip("[]").lower() if found else None


def _check_host(hosts: Sequence[bytes], version: str) -> None:
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise Refused(400, "a request has one Host")
    if hosts and host_name(hosts[0].decode("latin-1")) is None:
        raise Refused(400, "the Host is a name or an address, and a port if it needs one")


def _framing(lengths: Sequence[bytes], encodings: Sequence[bytes], version: str) -> Framing:
    if encodings and (lengths or version == "1.0"):
        raise Refused(400, "Transfer-Encoding is for HTTP/1.1, and without Content-Length")
    if encodings:
        if [encoding.lower() for encoding in encodings] != [b"chunked"]:
            raise Refused(501, "the only Transfer-Encoding that is served is chunked")
        return Framing(chunked=True)
    if len(lengths) > 1 or not all(length.isdigit() for length in lengths):
        raise Refused(400, "Content-Length is one number")
    return Framing(length=int(lengths[0])) if lengths else Framing()


def _values(fields: Fields, wanted: bytes) -> list[bytes]:
    return [value for name, value in fields if name == wanted]
