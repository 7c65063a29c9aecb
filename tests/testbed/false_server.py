"""A program that has taken the ports of a host's server, and answers as the server of an attacker might."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Final

from disagg.kv.preamble import NONCE_BYTES, PROOF_BYTES
from tests.secure import in_thread
from tests.testbed import network
from tests.testbed.bed import BedHost

_PROVEN: Final = json.dumps({"ok": True, "nonce": "5a" * NONCE_BYTES, "proof": "5a" * PROOF_BYTES}).encode()
HTTP_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
KV_ANSWER: Final = len(_PROVEN).to_bytes(4, "little") + _PROVEN
"""What a receiver answers to a preamble, with a proof that is none."""


@contextmanager
def false_server(host: BedHost, answers: Mapping[int, bytes]) -> Iterator[None]:
    """Within, it listens on these ports of the host, and sends the port's answer to whatever it is sent."""
    with ExitStack() as stack:
        for port, answer in answers.items():
            with network.inside(host.process):
                listener = socket.create_server(("0.0.0.0", port))
            stack.enter_context(in_thread(_Server(listener, type("Handler", (_Handler,), {"answer": answer}))))
        yield


class _Handler(BaseRequestHandler):
    answer = b""

    def handle(self) -> None:
        with suppress(OSError):
            while self.request.recv(1 << 16):
                self.request.sendall(self.answer)


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[_Handler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
