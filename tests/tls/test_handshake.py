"""A server is sent nothing before it has proven that it has the caller's token. Both ends in memory."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest

from disagg.tls.certificate import ServerTLS, client_tls, unproven
from disagg.tls.transport import HANDSHAKE, SecureTransport

SECRET = b"POST /decode HTTP/1.1\r\nAuthorization: Bearer token\r\n\r\na prompt"


class Wire(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return len(self.sent)

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        data, self.sent = bytes(self.sent), bytearray()
        return data


class Pair:
    """A caller and a server. recorded: all that the caller has sent."""

    def __init__(self, token: str, *tokens: str) -> None:
        tls = client_tls(token)
        self.wires = Wire(), Wire()
        self.caller = SecureTransport(self.wires[0], tls.context, tls)
        self.server = SecureTransport(self.wires[1], ServerTLS(lambda: tokens).context())
        self.recorded = b""

    def shake(self) -> None:
        """The handshake. Raises SSLError of the caller."""
        self.caller.decrypt(b"")
        for _ in range(4):
            self.pass_on()

    def pass_on(self) -> tuple[bytes, bytes]:
        """Bring what each end has sent to the other; returns what server and caller have received."""
        self.recorded += (sent := self.wires[0].take())
        received = self.server.decrypt(sent)
        return received, self.caller.decrypt(self.wires[1].take())


@pytest.mark.parametrize("tokens", [("token",), ("token", "old"), ("new", "token")])
def test_a_caller_and_a_server_that_has_its_token_understand_each_other(tokens: tuple[str, ...]) -> None:
    pair = Pair("token", *tokens)
    pair.shake()
    assert pair.caller.established and pair.server.established
    pair.caller.write(SECRET)
    pair.server.write(b"x" * 100_000)
    assert pair.pass_on() == (SECRET, b"x" * 100_000)
    assert pair.recorded[0] == HANDSHAKE and SECRET not in pair.recorded and b"Bearer" not in pair.recorded


def test_an_end_that_closes_says_so_and_the_other_one_can_tell_it_from_a_cut() -> None:
    pair = Pair("token", "token")
    pair.shake()
    pair.server.write(b"the end")
    pair.server.close()
    assert pair.pass_on() == (b"", b"the end") and pair.caller.ended and pair.wires[1].closed
    assert not pair.server.ended


def test_a_server_with_another_token_gets_no_more_than_the_first_message_of_a_handshake() -> None:
    pair = Pair("token", "another")
    pair.caller.decrypt(b"")
    hello = pair.wires[0].take()
    pair.server.decrypt(hello)
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        pair.caller.decrypt(pair.wires[1].take())
    assert not pair.caller.established
    assert "does not prove that it has the fleet's token" in unproven(caught.value, "d").message
    with pytest.raises(ssl.SSLError):
        pair.server.decrypt(pair.wires[0].take())  # an alert


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"\0" * 64])
def test_a_server_without_tls_is_told_from_one_with_another_token(answer: bytes) -> None:
    pair = Pair("token", "token")
    pair.caller.decrypt(b"")
    with pytest.raises(ssl.SSLError) as caught:
        pair.caller.decrypt(answer)
    assert "does not speak TLS" in unproven(caught.value, "d").message


def test_a_server_shows_a_new_token_as_soon_as_it_has_one() -> None:
    tokens = ["old"]
    server = ServerTLS(lambda: tokens)
    before = server.context()
    assert server.context() is before
    tokens.insert(0, "new")
    assert server.context() is not before


def test_a_stranger_cannot_make_a_server_keep_a_long_handshake() -> None:
    server = SecureTransport(Wire(), ServerTLS(lambda: ("token",)).context())
    length = 100_000
    server.decrypt(b"\x16\x03\x01\x38\x04\x01" + length.to_bytes(3, "big") + b"\0" * 0x3800)  # of a first message
    with pytest.raises(ssl.SSLError, match="too long"):
        server.decrypt(b"\x16\x03\x01\x38\x00" + b"\0" * 0x3800)
    assert not server.established


def test_nothing_is_sent_before_the_handshake_or_on_a_connection_that_closes() -> None:
    pair = Pair("token", "token")
    with pytest.raises(ConnectionError):
        pair.caller.write(SECRET)
    pair.shake()
    pair.caller.close()
    pair.wires[0].take()
    pair.caller.write(SECRET)
    assert not pair.wires[0].sent


def test_a_long_body_arrives_whole() -> None:
    pair, body = Pair("token", "token"), bytes(range(256)) * 4096
    pair.shake()
    pair.caller.write(body)
    assert pair.pass_on() == (body, b"")


def test_what_is_recorded_of_a_server_proves_nothing_later() -> None:
    pair = Pair("token", "token")
    pair.caller.decrypt(b"")
    pair.server.decrypt(pair.wires[0].take())
    recorded = pair.wires[1].take()
    later = Pair("token", "token")
    later.caller.decrypt(b"")
    with pytest.raises(ssl.SSLError):
        later.caller.decrypt(recorded)
    assert not later.caller.established
