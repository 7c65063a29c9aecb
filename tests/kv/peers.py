"""A receiver that misbehaves once it has the header."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from disagg.kv import frames
from disagg.kv.preamble import NONCE_BYTES, PREAMBLE, PROOF, Nonces, decode_preamble, decode_proof, proof
from tests.kv.kv_parts import PATIENCE_S


def identify(sock: socket.socket, ticket: str) -> None:
    """Read the preamble, prove that this end has the ticket, and read the header; nothing more if none comes."""
    preamble = decode_preamble(sock.recv(PREAMBLE.size, socket.MSG_WAITALL))
    nonces = Nonces(preamble.nonce, bytes(NONCE_BYTES), preamble.version)
    sock.sendall(frames.encode_identity(nonces.receiver, proof(ticket, "receiver", nonces)))
    if raw := sock.recv(PROOF.size, socket.MSG_WAITALL):
        sock.recv(decode_proof(raw).header_bytes, socket.MSG_WAITALL)


@contextmanager
def peer(behave: Callable[[socket.socket], None], ticket: str = "ticket") -> Iterator[int]:
    """A receiver that misbehaves: proves that it has the ticket, reads the header, then runs `behave`. Yields its
    port."""
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.settimeout(PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a reset overtakes the second of two replies
        with sock:
            identify(sock, ticket)
            behave(sock)
            ended.wait(PATIENCE_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join(PATIENCE_S)
