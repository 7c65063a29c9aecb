"""One TCP connection: `sendall` from each tensor, `recv_into` each tensor, 1 MiB per call: the bound for pure
Python."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection

from benchmarks.peers import memory
from benchmarks.peers.memory import Tensor
from benchmarks.peers.pair import TIMEOUT_S, Transport
from disagg.bench.handoff.transports import fill


class SocketSender:
    """See pair.Sender."""

    def __init__(self, tensors: list[Tensor], pipe: Connection) -> None:
        self._tensors = tensors
        self._socket: socket.socket | None = None

    def prepare(self, offer: int) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", offer), timeout=TIMEOUT_S)

    def send(self) -> None:
        assert self._socket is not None, "prepare comes first"
        for tensor in self._tensors:
            self._socket.sendall(tensor)


class SocketReceiver:
    """See pair.Receiver."""

    def __init__(self, tokens: int, pipe: Connection) -> None:
        self._tensors = memory.destination(tokens)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socket: socket.socket | None = None

    def offer(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self, answer: None) -> None:
        if self._socket is None:
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(TIMEOUT_S)

    def receive(self) -> Sequence[Tensor]:
        assert self._socket is not None, "accept comes first"
        for tensor in self._tensors:
            fill(self._socket, tensor)
        return self._tensors


TRANSPORT = Transport(SocketSender, SocketReceiver, {})
