"""A connected socket on which every read and write ends: done, or PeerLost after an idle timeout or a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from disagg.errors import PeerLost

IOV_MAX = 1024  # buffers per system call, on Linux and macOS
PIECE_BYTES = 1 << 20  # per system call: still in the core's own cache when `seen` reads it; 1 << 18 was a fifth slower
DRAIN_BYTES = 1 << 20

Seen = Callable[[memoryview], object]


class Channel:
    """One connection, used by one thread; only `abort` may come from another.

    deadline: on time.monotonic(), for everything. idle_s: the longest wait for any single sign of progress.
    Both may be changed between calls. Every failure is PeerLost and names the peer.
    """

    def __init__(self, sock: socket.socket, peer: str, *, deadline: float, idle_s: float) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.deadline = deadline
        self.idle_s = idle_s
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock)
        self._aborted = False
        self._closing = threading.Lock()

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes. The caller has checked that `count` is small."""
        raw = bytearray(count)
        self.read_into([memoryview(raw)])
        return bytes(raw)

    def read_into(self, views: Sequence[memoryview], seen: Seen | None = None) -> None:
        """Fill every view, in order. `seen` is given each piece right after it arrived, while it is in the cache."""
        todo = [view for view in views if len(view)]
        first = 0
        while first < len(todo):
            first = _advance(todo, first, self._receive(_batch(todo, first)), seen)

    def write(self, views: Sequence[memoryview], seen: Seen | None = None, *, heed_peer: bool = False) -> bool:
        """Send every view, in order; `seen` is given each piece right after it was sent.

        heed_peer: where sending has to wait and the peer has said something instead, stop and return False.
        """
        todo = [view for view in views if len(view)]
        first = 0
        while first < len(todo):
            if heed_peer and self._aborted:
                raise self._ended_here()
            try:
                count = self._sock.sendmsg(_batch(todo, first))
            except BlockingIOError:
                if self._wait(select.POLLOUT | (select.POLLIN if heed_peer else 0)) & select.POLLIN:
                    return False
            except OSError as error:
                raise self._lost(error) from error
            else:
                first = _advance(todo, first, count, seen)
        return True

    def readable(self) -> bool:
        """True when a read would return at once: bytes, the peer's end, or an error."""
        self._poll.modify(self._sock, select.POLLIN)
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """Make the owning thread's read or heeding write fail at once; it can still send a last reply.

        From any thread, at any time.
        """
        self._aborted = True
        with self._closing:
            if self._sock.fileno() >= 0:
                _shutdown(self._sock, socket.SHUT_RD)  # wakes a thread that waits in poll

    def close(self) -> None:
        """Close at once; what the peer has not read yet may be lost."""
        with self._closing:
            self._sock.close()

    def close_gently(self, linger_s: float) -> None:
        """Close so that the peer can still read the last reply: drain what it sends, for at most `linger_s`.

        Closing a socket with unread bytes resets the connection, and a reset may overtake the reply.
        """
        self.deadline = time.monotonic() + linger_s
        _shutdown(self._sock, socket.SHUT_WR)
        waste = [memoryview(bytearray(DRAIN_BYTES))]
        try:
            while time.monotonic() < self.deadline:
                self._receive(waste)
        except PeerLost:  # its end, which is what was waited for, or a silence that is not worth more time
            pass
        finally:
            self.close()

    def _receive(self, views: list[memoryview]) -> int:
        while True:
            if self._aborted:
                raise self._ended_here()
            try:
                count = self._sock.recvmsg_into(views)[0]
            except BlockingIOError:
                self._wait(select.POLLIN)
            except OSError as error:
                raise self._lost(error) from error
            else:
                if count == 0:
                    raise PeerLost(f"{self.peer} closed the connection before the transfer was complete")
                return count

    def _wait(self, events: int) -> int:
        remaining = self.deadline - time.monotonic()
        self._poll.modify(self._sock, events)
        ready = self._poll.poll(max(0.0, min(self.idle_s, remaining)) * 1000)
        if ready:
            return ready[0][1]
        if remaining <= self.idle_s:
            raise PeerLost(f"the transfer's deadline passed while waiting for {self.peer}")
        raise PeerLost(f"{self.peer} made no progress for {self.idle_s:g} s", "check the host and the link to it")

    def _ended_here(self) -> PeerLost:
        return PeerLost(f"the connection to {self.peer} was ended on this side")

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"the connection to {self.peer} broke: {error}", "check the host and the link to it")


def _batch(todo: list[memoryview], first: int) -> list[memoryview]:
    """The views for one system call: some of the next ones, together about PIECE_BYTES."""
    batch: list[memoryview] = []
    room = PIECE_BYTES
    for view in todo[first : first + IOV_MAX]:
        batch.append(view[:room])
        room -= len(view)
        if room <= 0:
            break
    return batch


def _advance(todo: list[memoryview], first: int, count: int, seen: Seen | None) -> int:
    """Account for `count` bytes moved from todo[first] on; returns the first view that is not done."""
    while count:
        view = todo[first]
        if count < len(view):
            todo[first] = view[count:]
            view = view[:count]
        else:
            first += 1
        count -= len(view)
        if seen is not None:
            seen(view)
    return first


def _shutdown(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the peer was quicker: the connection is already gone, as wished
        sock.shutdown(how)
