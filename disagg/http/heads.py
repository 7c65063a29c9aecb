"""What the head of a request may be, beyond what the parser checks. Pure.

There is one reading of where a request ends, of the path that it asks for and of the host that it names. A request that
a proxy in front of this server could read in another way is refused: its body could hide a second one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_HEAD_BYTES: Final = 64 << 10
MAX_FIELDS: Final = 128
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?", re.ASCII)

Fields = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values."""


class Refused(Exception):
    """A request that is read no further. status: of the answer. Its text is one line, with nothing of the request."""

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
