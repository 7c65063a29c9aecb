"""Two fresh processes, a sender and a receiver, and one timed transfer between them.

An untimed transfer precedes it, which makes connections and allocates buffers. Clock: time.monotonic(), which both
processes share, from just before `send` until both ends of every tensor are in place at the receiver. All bytes are
compared afterwards, untimed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.peers import memory
from benchmarks.peers.memory import Tensor

TIMEOUT_S = 60.0
_WARM_UP, _TIMED = 1, 2


class Sender(Protocol):
    """Has the source tensors from construction on, registered if its library requires that."""

    def prepare(self, offer: Any) -> Any:
        """Untimed: use the receiver's offer; returns the answer for its `accept`."""

    def send(self) -> None:
        """Timed: do this end's part of one transfer."""


class Receiver(Protocol):
    """Has the destination tensors, or allocates them as the bytes arrive."""

    def offer(self) -> Any:
        """Untimed: what the sender needs to connect."""

    def accept(self, answer: Any) -> None:
        """Untimed: called with the result of the sender's `prepare`."""

    def receive(self) -> Sequence[Tensor]:
        """Timed: do this end's part; returns the tensors. Their last bytes may still be arriving."""


@dataclass(frozen=True, slots=True)
class Transport:
    """How to build both ends. Both get the number of tokens and a pipe to each other for small messages."""

    sender: Callable[[list[Tensor], Connection], Sender]
    receiver: Callable[[int, Connection], Receiver]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """One timed transfer: seconds by the clock above, and CPU seconds of each process during it."""

    nbytes: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


class TransferFailed(Exception):
    """A transport failed or delivered other bytes than were sent."""


def run(transport: Transport, tokens: int) -> TimedTransfer:
    """One transfer; both processes have ended when it returns."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    to_receiver, to_sender = context.Pipe()
    ends = (
        context.Process(target=_end, args=(there, _send_all, transport, tokens, to_receiver), daemon=True),
        context.Process(target=_end, args=(there, _receive_all, transport, tokens, to_sender), daemon=True),
    )
    for process in ends:
        process.start()
    for handle in (there, to_receiver, to_sender):
        handle.close()
    try:
        results = dict(_word(here) for _ in ends)
    finally:
        for process in ends:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        here.close()
    sent, received = results["sender"], results["receiver"]
    return TimedTransfer(memory.nbytes_of(tokens), received["ended"] - sent["began"], sent["cpu_s"], received["cpu_s"])


def receive_message(pipe: Connection) -> Any:
    """The next message from the other end; TransferFailed if there is none within TIMEOUT_S."""
    if not pipe.poll(TIMEOUT_S):
        raise TransferFailed(f"the other process sent nothing for {TIMEOUT_S:g} s")
    return pipe.recv()


def _word(pipe: Connection) -> tuple[str, dict[str, float]]:
    try:
        name, result = receive_message(pipe)
    except EOFError:
        raise TransferFailed("a process ended without a result") from None
    if isinstance(result, str):
        raise TransferFailed(f"{name}: {result}")
    return name, result


def _end(parent: Connection, work: Callable[..., tuple[str, Any]], transport: Transport, *rest: Any) -> None:
    """A process's main: report the result or the failure, and exit without waiting for a library's threads."""
    os.environ.update(transport.environment)
    name = "sender" if work is _send_all else "receiver"
    try:
        parent.send(work(transport, *rest))
    except Exception as error:  # noqa: BLE001 - any error of a peer's library is that peer's result
        with suppress(OSError):
            parent.send((name, f"{type(error).__name__}: {error}"))
    os._exit(0)


def _send_all(transport: Transport, tokens: int, pipe: Connection) -> tuple[str, dict[str, float]]:
    tensors = memory.source(tokens)
    sender = transport.sender(tensors, pipe)
    result: dict[str, float] = {}
    for number in (_WARM_UP, _TIMED):
        memory.stamp(tensors, number)
        pipe.send((sender.prepare(receive_message(pipe)), memory.digest(tensors)))
        receive_message(pipe)  # the receiver is ready
        cpu, began = time.process_time(), time.monotonic()
        sender.send()
        receive_message(pipe)  # all tensors are in place
        result = {"began": began, "cpu_s": time.process_time() - cpu}
        receive_message(pipe)  # and were compared
    return "sender", result


def _receive_all(transport: Transport, tokens: int, pipe: Connection) -> tuple[str, dict[str, float]]:
    receiver = transport.receiver(tokens, pipe)
    result: dict[str, float] = {}
    for number in (_WARM_UP, _TIMED):
        pipe.send(receiver.offer())
        answer, expected = receive_message(pipe)
        receiver.accept(answer)
        cpu = time.process_time()
        pipe.send("ready")
        tensors = receiver.receive()
        memory.wait_stamped(tensors, number, timeout_s=TIMEOUT_S)
        result = {"ended": time.monotonic(), "cpu_s": time.process_time() - cpu}
        pipe.send("in place")
        if memory.digest(tensors) != expected:
            raise TransferFailed("the bytes in place are not the bytes sent")
        del tensors  # so that a transport that allocates them finds the last ones' pages again
        pipe.send("right")
    return "receiver", result
