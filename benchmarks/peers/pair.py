"""Two fresh processes, a sender and a receiver, and one timed transfer between them.

One transfer goes first, untimed: connections are made and buffers found by it. Clock: time.monotonic() of this machine,
which both processes share, from just before `send` until the receiver sees both ends of every tensor in place. All
bytes are compared afterwards, outside the time.
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
    """Holds the source tensors from construction on, registered where its library wants that."""

    def prepare(self, offer: Any) -> Any:
        """Untimed: take what the receiver offers, and answer it."""

    def send(self) -> None:
        """Timed: do this end's part of one transfer."""


class Receiver(Protocol):
    """Holds the destination tensors, or gets them as the bytes arrive."""

    def offer(self) -> Any:
        """Untimed: what the sender must know to reach the tensors."""

    def accept(self, answer: Any) -> None:
        """Untimed: what the sender's `prepare` answered."""

    def receive(self) -> Sequence[Tensor]:
        """Timed: do this end's part; the tensors, filled as far as this end can tell."""


@dataclass(frozen=True, slots=True)
class Transport:
    """How to build both ends. Both get the number of tokens and a pipe to each other, for words as small as "go"."""

    sender: Callable[[list[Tensor], Connection], Sender]
    receiver: Callable[[int, Connection], Receiver]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One timed transfer: seconds by the clock above, and CPU seconds that each process spent meanwhile."""

    nbytes: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


class TurnFailed(Exception):
    """A transport broke, or moved other bytes than it was given."""


def run(transport: Transport, tokens: int) -> Turn:
    """One turn; both processes have ended when it returns."""
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
    return Turn(memory.nbytes_of(tokens), received["ended"] - sent["began"], sent["cpu_s"], received["cpu_s"])


def hear(pipe: Connection) -> Any:
    """The next word from the other end; TurnFailed where none comes."""
    if not pipe.poll(TIMEOUT_S):
        raise TurnFailed(f"the other process said nothing for {TIMEOUT_S:g} s")
    return pipe.recv()


def _word(pipe: Connection) -> tuple[str, dict[str, float]]:
    try:
        name, result = hear(pipe)
    except EOFError:
        raise TurnFailed("a process ended without a result") from None
    if isinstance(result, str):
        raise TurnFailed(f"{name}: {result}")
    return name, result


def _end(parent: Connection, work: Callable[..., tuple[str, Any]], transport: Transport, *rest: Any) -> None:
    """A process's main: report the result or the failure, and leave without waiting for a library's threads."""
    os.environ.update(transport.environment)
    name = "sender" if work is _send_all else "receiver"
    try:
        parent.send(work(transport, *rest))
    except Exception as error:  # noqa: BLE001 - whatever a peer's library raises is that peer's result
        with suppress(OSError):
            parent.send((name, f"{type(error).__name__}: {error}"))
    os._exit(0)


def _send_all(transport: Transport, tokens: int, pipe: Connection) -> tuple[str, dict[str, float]]:
    tensors = memory.source(tokens)
    sender = transport.sender(tensors, pipe)
    result: dict[str, float] = {}
    for number in (_WARM_UP, _TIMED):
        memory.stamp(tensors, number)
        pipe.send((sender.prepare(hear(pipe)), memory.digest(tensors)))
        hear(pipe)  # the receiver has begun to listen
        cpu, began = time.process_time(), time.monotonic()
        sender.send()
        hear(pipe)  # all in place
        result = {"began": began, "cpu_s": time.process_time() - cpu}
        hear(pipe)  # and right
    return "sender", result


def _receive_all(transport: Transport, tokens: int, pipe: Connection) -> tuple[str, dict[str, float]]:
    receiver = transport.receiver(tokens, pipe)
    result: dict[str, float] = {}
    for number in (_WARM_UP, _TIMED):
        pipe.send(receiver.offer())
        answer, expected = hear(pipe)
        receiver.accept(answer)
        cpu = time.process_time()
        pipe.send("ready")
        tensors = receiver.receive()
        memory.wait_stamped(tensors, number, timeout_s=TIMEOUT_S)
        result = {"ended": time.monotonic(), "cpu_s": time.process_time() - cpu}
        pipe.send("in place")
        if memory.digest(tensors) != expected:
            raise TurnFailed("the bytes in place are not the bytes sent")
        del tensors  # so that a transport that allocates them finds the last ones' pages again
        pipe.send("right")
    return "receiver", result
