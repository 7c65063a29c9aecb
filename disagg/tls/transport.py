"""TLS between an asyncio transport and the protocol above it.

Not asyncio's own: that allocates 256 KiB for each connection, and takes it over before a server has seen the first
byte, which distinguishes TLS from plain HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any

from disagg.tls.certificate import ClientTLS

READ_BYTES = 1 << 14  # a record, which is what OpenSSL gives at a time
WRITE_BYTES = 1 << 18  # encrypted at a time, so that a long body is in memory once
MAX_HANDSHAKE_BYTES = 1 << 14
"""The most that the other end may send before its handshake is complete; OpenSSL alone would buffer 128 KiB."""
MAX_UNREAD_BYTES = 1 << 20
"""The most that this end sends and the other one does not read, if it asks for still more without sending data."""
HANDSHAKE = 0x16
"""The first byte of a connection with TLS; no method of HTTP begins with it."""


class SecureTransport(asyncio.Transport):
    """What a protocol writes to. What it receives it passes to `decrypt`. client: what the caller's end has besides
    `context`; None at the server's end.

    established: the handshake is complete, and the server is one of the fleet. ended: the other end has stated that it
    sends nothing more; a connection that ends without that was cut.
    """

    def __init__(self, below: asyncio.Transport, context: ssl.SSLContext, client: ClientTLS | None = None) -> None:
        super().__init__()
        self.established = self.ended = self._ending = False
        self._handshake_bytes = 0
        self._below, self._client = below, client
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = client.server_name if client else None
        self._tls = context.wrap_bio(self._received, self._sent, server_side=client is None, server_hostname=name)

    def decrypt(self, data: bytes | memoryview) -> bytes:
        """What was sent to the protocol in these bytes; nothing during the handshake, which goes on. A caller begins it
        with no bytes. Raises SSLError, after which the connection is of no use."""
        self._received.write(data)
        try:
            if not self.established:
                self._shake(len(data))
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        finally:
            self._answer()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send, unless the connection is closing. The handshake is complete: a protocol is given nothing to
        answer before."""
        if not self.established:
            raise ConnectionError("the handshake is not complete")
        rest = memoryview(data)
        while rest and not self._below.is_closing():
            rest = rest[self._tls.write(rest[:WRITE_BYTES]) :]
            self._flush()

    def write_eof(self) -> None:
        self._end()
        self._below.write_eof()

    def close(self) -> None:
        self._end()
        self._below.close()

    def abort(self) -> None:
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def is_reading(self) -> bool:
        return self._below.is_reading()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)

    def _end(self) -> None:
        """State, once, that this end sends nothing more; does not wait for the other."""
        if self.established and not self._ending and not self._below.is_closing():
            self._ending = True
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()

    def _shake(self, received: int) -> None:
        """Go on with the handshake. Raises SSLWantReadError until it is complete, else SSLError if it fails."""
        self._handshake_bytes += received
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if self._handshake_bytes > MAX_HANDSHAKE_BYTES:
                raise ssl.SSLError("the handshake is too long") from None
            raise
        if self._client is not None:
            self._client.require(self._tls)
        self.established = True

    def _read(self) -> bytes:
        """All that has arrived. Whether something has is asked first: to read without raises an exception (6 us)."""
        pieces = list[bytes]()
        try:
            while self._received.pending or self._tls.pending():
                if not (piece := self._tls.read(READ_BYTES)):
                    self.ended = True
                    break
                pieces.append(piece)
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLWantReadError:  # a part of a record
            pass
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _answer(self) -> None:
        """Send what TLS itself answers: its part of the handshake, or a new key that the other end has asked for."""
        if self._sent.pending:
            if self._below.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._below.abort()
            self._flush()

    def _flush(self) -> None:
        if (data := self._sent.read()) and not self._below.is_closing():
            self._below.write(data)
