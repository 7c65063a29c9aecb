"""A connected socket with an idle timeout and a deadline: every read and write completes or raises PeerLost."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from disagg.errors import PeerLost

IOV_MAX = 1024  # buffers per system call, on Linux and macOS
# Per system call. A piece this small is still in the core's cache when `on_piece` reads it; 1 << 18 was a fifth slower.
PIECE_BYTES = 1 << 20
DRAIN_BYTES = 1 << 20

OnReply = Callable[[], bool]
OnPiece = Callable[[memoryview], object]  # called with each piece right after it was sent or received


class Channel:
    """One connection, used by one thread; only `abort` and `reply` may be called from another.

    deadline: when all calls must have ended, by time.monotonic(). idle_s: the longest wait without any progress.
    Both may be changed between calls. Every failure is a PeerLost that names the peer.
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

    def read_into(self, views: Sequence[memoryview], on_piece: OnPiece | None = None) -> None:
        """Fill every view, in order."""
        todo = [view for view in views if len(view)]
        first = 0
        while first < len(todo):
            first = _advance(todo, first, self._receive(_batch(todo, first)), on_piece)

    def write(
        self, views: Sequence[memoryview], on_piece: OnPiece | None = None, *, on_reply: OnReply | None = None
    ) -> bool:
        """Send every view, in order; returns True.

        on_reply: called if the socket is not writable but the peer has sent something. If it returns False, nothing
        more is sent, and this returns False.
        """
        todo = [view for view in views if len(view)]
        first = 0
        while first < len(todo):
            if on_reply is not None and self._aborted:
                raise self._ended_here()
            try:
                count = self._sock.sendmsg(_batch(todo, first))
            except BlockingIOError:
                replied = self._wait(select.POLLOUT | (select.POLLIN if on_reply else 0)) & select.POLLIN
                if replied and on_reply is not None and not on_reply():
                    return False
            except OSError as error:
                raise self._lost(error) from error
            else:
                first = _advance(todo, first, count, on_piece)
        return True

    def readable(self, wait_s: float = 0.0) -> bool:
        """True if a read would return at once: with bytes, the end of the stream, or an error. Waits so long for it."""
        self._poll.modify(self._sock, select.POLLIN)
        return bool(self._poll.poll(wait_s * 1000))

    def reply(self, raw: bytes) -> None:
        """Send a few bytes while the owning thread reads. May be called from any thread, one at a time, which does not
        wait: a peer that has left as many unread as its connection holds is given up."""
        try:
            if self._sock.send(raw) == len(raw):
                return
        except BlockingIOError:
            pass
        except OSError:  # the owning thread finds out
            return
        self.abort()

    def abort(self) -> None:
        """Make the owning thread's read, or write with `on_reply`, fail at once; it can still send a reply.

        May be called from any thread, at any time.
        """
        self._aborted = True
        with self._closing:
            if self._sock.fileno() >= 0:
                _shutdown(self._sock, socket.SHUT_RD)  # wakes a thread that waits in poll

    def close(self) -> None:
        """Close at once; bytes that the peer has not read yet may be lost."""
        with self._closing:
            self._sock.close()

    def close_gently(self, linger_s: float) -> None:
        """Close so that the peer can still read the last reply: discard what it sends, for at most `linger_s`.

        Closing a socket with unread bytes resets the connection, and a reset may overtake the reply.
        """
        self.deadline = time.monotonic() + linger_s
        _shutdown(self._sock, socket.SHUT_WR)
        waste = [memoryview(bytearray(DRAIN_BYTES))]
        try:
            while time.monotonic() < self.deadline:
                self._receive(waste)
        except PeerLost:  # the end of its stream, as intended, or a timeout
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
        if ready and remaining > 0:
            return ready[0][1]
        if remaining <= self.idle_s:
            raise PeerLost(f"the transfer's deadline passed while waiting for {self.peer}")
        raise PeerLost(f"{self.peer} made no progress for {self.idle_s:g} s", "check the host and the link to it")

    def _ended_here(self) -> PeerLost:
        return PeerLost(f"the connection to {self.peer} was ended on this side")

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"the connection to {self.peer} broke: {error}", "check the host and the link to it")


def give_up_unacknowledged(sock: socket.socket, seconds: float) -> None:
    """Let the kernel break the connection if the peer acknowledges nothing of what was sent for so long: while a prompt
    is computed only small frames are sent, which a cut link would otherwise take for a quarter of an hour."""
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    elif sys.platform == "darwin":  # TCP_RXT_CONNDROPTIME of <netinet/tcp.h>, which Python does not define; in seconds
        sock.setsockopt(socket.IPPROTO_TCP, 0x80, max(1, int(seconds)))


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


def _advance(todo: list[memoryview], first: int, count: int, on_piece: OnPiece | None) -> int:
    """Account for `count` bytes moved from todo[first] on; returns the first view that is not done."""
    while count:
        view = todo[first]
        if count < len(view):
            todo[first] = view[count:]
            view = view[:count]
        else:
            first += 1
        count -= len(view)
        if on_piece is not None:
            on_piece(view)
    return first


def _shutdown(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the peer has already closed the connection
        sock.shutdown(how)
