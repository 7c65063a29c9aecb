"""The blocks of one transfer that are not sent yet: the compute thread puts them, the sender thread takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import DisaggError, PeerLost
from disagg.kv.wire.frames import Frame


@dataclass(frozen=True, slots=True)
class FramedBlock:
    """A block ready to send: its `wait` (see KVBlock), and its frames with their payloads."""

    wait: Callable[[], None] | None
    frames: list[tuple[Frame, list[memoryview]]]

    @property
    def nbytes(self) -> int:
        return sum(frame.length for frame, _ in self.frames)


class Outbox:
    """A queue that never makes its writer wait, and the failure that ended the transfer. Safe to use from any thread.

    Blocks are views of memory that exists anyway, so the queue counts bytes, not blocks. max_bytes: the transfer fails
    beyond it; whoever computes is expected to pause long before.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._blocks: deque[FramedBlock] = deque()
        self._bytes = 0
        self._ended = False
        self._failure: DisaggError | None = None

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were put and are not sent yet."""
        return self._bytes

    @property
    def failure(self) -> DisaggError | None:
        """The first failure, None while there is none."""
        return self._failure

    def put(self, block: FramedBlock) -> None:
        """Queue a block. Raises the failure if there is one; fails with PeerLost if the queue would be too long."""
        with self._changed:
            nbytes = block.nbytes
            if self._failure is None and self._bytes + nbytes > self._max_bytes:
                self._fail(PeerLost(f"{self._bytes} bytes of KV wait to be sent, at most {self._max_bytes} may"))
            self._raise_failure()
            self._blocks.append(block)
            self._bytes += nbytes
            self._changed.notify_all()

    def end(self) -> None:
        """There are no more blocks. Raises the failure if there is one."""
        with self._changed:
            self._raise_failure()
            self._ended = True
            self._changed.notify_all()

    def take(self, timeout: float) -> FramedBlock | None:
        """The next block, or None after the last one. TimeoutError if there is none yet; raises the failure if there
        is one. Its bytes count as queued until `sent`."""
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._ended or self._failure is not None, timeout)
            self._raise_failure()
            if self._blocks:
                return self._blocks.popleft()
            if self._ended:
                return None
            raise TimeoutError

    def sent(self, nbytes: int) -> None:
        """So many bytes of a taken block were sent."""
        with self._changed:
            if self._failure is None:  # else nothing counts as queued any more
                self._bytes -= nbytes

    def fail(self, error: DisaggError) -> None:
        """End with this failure unless there was one before: it is the cause, later ones are its consequences."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: DisaggError) -> None:
        self._failure = self._failure or error
        self._blocks.clear()
        self._bytes = 0
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
