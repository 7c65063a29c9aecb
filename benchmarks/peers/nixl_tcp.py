"""NIXL with UCX over TCP; UCX_TLS=tcp excludes shared memory and CMA.

Three ways: the receiver reads, with each agent's progress thread (NIXL's default configuration); the sender writes,
with the progress threads; and the sender writes while both processes busy-wait instead of using these threads, which
occupies two cores and is the fastest if there are only two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.peers import memory
from benchmarks.peers.memory import Tensor
from benchmarks.peers.pair import TIMEOUT_S, Transport, receive_message

_ENVIRONMENT = {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR"}
_ARRIVED = b"arrived"

Where = tuple[bytes, bytes]  # an agent's metadata and its descriptors


class _End:
    """An agent with the tensors registered, and the other end's descriptors."""

    def __init__(self, name: str, tensors: list[Tensor], pipe: Connection, *, thread: bool) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._tensors = tensors
        self._pipe = pipe
        self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=thread, backends=["UCX"]))
        self._agent.register_memory([(*place, "") for place in self._places], "DRAM")
        self._ours = self._agent.get_xfer_descs(self._places, "DRAM")
        self._theirs: Any = None
        self._peer = ""

    @property
    def where(self) -> Where:
        return self._agent.get_agent_metadata(), self._agent.get_serialized_descs(self._ours)

    @property
    def _places(self) -> list[tuple[int, int, int]]:
        return [(tensor.ctypes.data, tensor.nbytes, 0) for tensor in self._tensors]

    def _connect(self, where: Where) -> None:
        if self._theirs is None:
            self._peer = self._agent.add_remote_agent(where[0])
            self._theirs = self._agent.deserialize_descs(where[1])

    def _move(self, operation: str) -> None:
        handle = self._agent.initialize_xfer(operation, self._ours, self._theirs, self._peer, _ARRIVED)
        state, deadline = self._agent.transfer(handle), time.monotonic() + TIMEOUT_S
        while state == "PROC" and time.monotonic() < deadline:
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL's {operation} ended as {state}")
        self._agent.release_xfer_handle(handle)


class _Sender(_End):
    """See pair.Sender."""

    def __init__(self, tensors: list[Tensor], pipe: Connection, *, thread: bool) -> None:
        super().__init__("sender", tensors, pipe, thread=thread)

    def prepare(self, offer: Where) -> Where:
        self._connect(offer)
        return self.where


class _Receiver(_End):
    """See pair.Receiver."""

    def __init__(self, tokens: int, pipe: Connection, *, thread: bool) -> None:
        super().__init__("receiver", memory.destination(tokens), pipe, thread=thread)

    def offer(self) -> Where:
        return self.where

    def accept(self, answer: Where) -> None:
        self._connect(answer)


class WritingSender(_Sender):
    """The sender writes; a notification follows the last byte."""

    def send(self) -> None:
        self._move("WRITE")


class WrittenReceiver(_Receiver):
    """Busy-waits for the notification: without a progress thread, these calls move the bytes."""

    def receive(self) -> Sequence[Tensor]:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._agent.check_remote_xfer_done("sender", _ARRIVED):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no notification within {TIMEOUT_S:g} s")
        return self._tensors


class ReadSender(_Sender):
    """The receiver reads after this end's message; this end's progress thread serves it."""

    def send(self) -> None:
        self._pipe.send("read")


class ReadingReceiver(_Receiver):
    def receive(self) -> Sequence[Tensor]:
        receive_message(self._pipe)
        self._move("READ")
        return self._tensors


def _transport(sender: Any, receiver: Any, *, thread: bool) -> Transport:
    return Transport(partial(sender, thread=thread), partial(receiver, thread=thread), _ENVIRONMENT)


READ = _transport(ReadSender, ReadingReceiver, thread=True)
WRITE = _transport(WritingSender, WrittenReceiver, thread=True)
WRITE_SPINNING = _transport(WritingSender, WrittenReceiver, thread=False)
