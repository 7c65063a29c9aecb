"""Mooncake Transfer Engine over TCP, with metadata by handshake between the two ends.

Its settings for lanes, connection pool and slice size (MC_TCP_*) have their defaults: on 2 cores no other value was
faster, and larger slices were much slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.peers import memory
from benchmarks.peers.memory import Tensor
from benchmarks.peers.pair import Transport, receive_message

_ENVIRONMENT = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3", "MC_FORCE_TCP": "1"}


class _End:
    """An engine with the tensors registered, and the addresses of the other end's."""

    def __init__(self, tensors: list[Tensor], pipe: Connection) -> None:
        from mooncake.engine import TransferEngine

        self._tensors = tensors
        self._pipe = pipe
        self._engine: Any = TransferEngine()
        self._require("initialize", self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._require("register", self._engine.batch_register_memory(self._addresses, self._sizes))
        self._theirs: tuple[str, list[int]] = ("", [])

    @property
    def where(self) -> tuple[str, list[int]]:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._addresses

    @property
    def _addresses(self) -> list[int]:
        return [tensor.ctypes.data for tensor in self._tensors]

    @property
    def _sizes(self) -> list[int]:
        return [tensor.nbytes for tensor in self._tensors]

    def _move(self, direction: str) -> None:
        host, addresses = self._theirs
        move = getattr(self._engine, f"batch_transfer_sync_{direction}")
        self._require(direction, move(host, self._addresses, addresses, self._sizes))

    def _require(self, what: str, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"Mooncake's {what} returned {code}")


class _Sender(_End):
    """See pair.Sender."""

    def prepare(self, offer: tuple[str, list[int]]) -> tuple[str, list[int]]:
        self._theirs = offer
        return self.where


class _Receiver(_End):
    """See pair.Receiver."""

    def __init__(self, tokens: int, pipe: Connection) -> None:
        super().__init__(memory.destination(tokens), pipe)

    def offer(self) -> tuple[str, list[int]]:
        return self.where

    def accept(self, answer: tuple[str, list[int]]) -> None:
        self._theirs = answer


class WritingSender(_Sender):
    """The sender writes into the receiver's memory."""

    def send(self) -> None:
        self._move("write")
        self._pipe.send("written")


class WrittenReceiver(_Receiver):
    def receive(self) -> Sequence[Tensor]:
        receive_message(self._pipe)
        return self._tensors


class ReadSender(_Sender):
    """The receiver reads from the sender's memory after the sender's message."""

    def send(self) -> None:
        self._pipe.send("read")


class ReadingReceiver(_Receiver):
    def receive(self) -> Sequence[Tensor]:
        receive_message(self._pipe)
        self._move("read")
        return self._tensors


WRITE = Transport(WritingSender, WrittenReceiver, _ENVIRONMENT)
READ = Transport(ReadSender, ReadingReceiver, _ENVIRONMENT)
