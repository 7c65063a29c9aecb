"""Credit for hidden states, from the sender's side."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import pytest

from disagg.errors import DisaggError, PeerLost, ProtocolError
from disagg.kv import frames
from disagg.kv import transfer as transfer_module
from disagg.kv.arriving import CREDIT_CHUNKS
from disagg.kv.frames import Credit, encode_credit
from disagg.kv.transfer import SendLimits, Transfer
from tests.deadlines import wait_until
from tests.kv.chunk_parts import Prompt
from tests.kv.kv_parts import PATIENCE_S
from tests.kv.peers import peer

PROMPT = Prompt.random(40)


def failure(behave: Callable[[socket.socket], None], limits: SendLimits) -> DisaggError:
    """Why a transfer of the prompt in chunks of 4 fails, to a receiver that behaves so after the header."""
    with peer(behave) as port:
        header = PROMPT.header(layers=4)
        transfer = Transfer("127.0.0.1", port, header, deadline=time.monotonic() + PATIENCE_S, limits=limits)
        with transfer, pytest.raises(DisaggError) as failed:
            for block in PROMPT.blocks(4):
                transfer.send(block)
            transfer.finish()
        return failed.value


def allow(*credits: Credit, every_s: float = 0.0) -> Callable[[socket.socket], None]:
    """A receiver that reads everything and says this; the last again and again."""

    def behave(sock: socket.socket) -> None:
        sock.settimeout(every_s or PATIENCE_S)
        for credit in credits:
            sock.sendall(encode_credit(credit))
        with contextlib.suppress(OSError):
            while True:
                try:
                    if not sock.recv(1 << 16):
                        return
                except TimeoutError:
                    sock.sendall(encode_credit(credits[-1]))

    return behave


def test_a_receiver_that_gives_no_credit_and_says_nothing_is_given_up() -> None:
    error = failure(allow(Credit(0, CREDIT_CHUNKS)), SendLimits(stall_s=0.3))
    assert isinstance(error, PeerLost)
    assert "lets no chunk be sent, and has said nothing for 0.3 s" in error.message


def test_a_receiver_that_says_it_runs_but_computes_nothing_is_given_up_later() -> None:
    error = failure(allow(Credit(0, 1), every_s=0.05), SendLimits(stall_s=0.3, credit_s=0.6))
    assert isinstance(error, PeerLost) and "has computed no chunk for 0.6 s" in error.message


@pytest.mark.parametrize(
    "reply",
    [
        frames.encode_ok(),
        frames.encode_ok(chunks=0, credit=-1),
        frames.encode_ok(chunks="0", credit=4),
        frames.encode_ok(chunks=5, credit=4),
        frames.encode_ok(chunks=0, credit=1 << 32),
    ],
)
def test_a_reply_to_the_header_without_a_proper_credit_is_an_error(reply: bytes) -> None:
    error = failure(lambda sock: sock.sendall(reply), SendLimits())
    assert isinstance(error, ProtocolError)


def test_an_error_of_the_receiver_in_mid_transfer_is_the_transfers_failure() -> None:
    def behave(sock: socket.socket) -> None:
        sock.sendall(encode_credit(Credit(0, CREDIT_CHUNKS)))
        sock.sendall(encode_credit(Credit(1, CREDIT_CHUNKS)))
        sock.sendall(frames.encode_error(ProtocolError("chunk 1 is odd")))

    error = failure(behave, SendLimits())
    assert isinstance(error, ProtocolError) and error.message == "chunk 1 is odd"


def test_credit_that_comes_while_bytes_are_sent_is_read_without_a_wait() -> None:
    """The receiver allows everything at once: the sender is not starved, although it has waited for nothing."""
    got: list[int] = []

    def behave(sock: socket.socket) -> None:
        sock.sendall(encode_credit(Credit(0, 1)))
        sock.sendall(encode_credit(Credit(1, 1000)))
        while piece := sock.recv(1 << 16):
            got.append(len(piece))

    with peer(behave) as port:
        header = PROMPT.header()
        with Transfer("127.0.0.1", port, header, deadline=time.monotonic() + PATIENCE_S) as transfer:
            for block in PROMPT.blocks(4):
                transfer.send(block)
            wait_until(lambda: transfer.queued_bytes == 0 and not transfer.starved)
    assert sum(got) > PROMPT.head.nbytes(40)


def test_credit_is_read_with_the_end_of_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when nothing is left to send: a quick engine always has the next layer."""
    monkeypatch.setattr(transfer_module, "CREDIT_POLL_S", PATIENCE_S)

    def behave(sock: socket.socket) -> None:
        sock.sendall(encode_credit(Credit(0, 1)) + encode_credit(Credit(1, 1000)))
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 16):
                pass

    with peer(behave) as port:
        header = PROMPT.header()
        with Transfer("127.0.0.1", port, header, deadline=time.monotonic() + PATIENCE_S) as transfer:
            for block in PROMPT.chunk(0, 4):
                transfer.send(block)
            wait_until(lambda: transfer._credit.allowed == 1000, PATIENCE_S / 2)
