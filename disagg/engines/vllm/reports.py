"""What the workers of an engine report about the KV that they send, in the process of the engine."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from disagg.api.base import InvalidValue
from disagg.api.delivery import MAX_LINE_BYTES, KVReport, ReportHello
from disagg.api.requests import KVAddress
from disagg.errors import DisaggError, PeerLost

POLL_S = 0.5


@dataclass(slots=True, eq=False)
class Awaited:
    """The reports of one prompt. done: all of them, one per part, or the first error."""

    id: str
    done: Future[Sequence[KVReport]] = field(default_factory=Future)
    reports: list[KVReport] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)

    def add(self, report: KVReport, parts: int) -> None:
        self.reports.append(report)
        if report.error is not None:
            self.fail(DisaggError.from_json(dict(report.error)))
        elif len(self.reports) == parts and not self.done.done():
            self.done.set_result(tuple(self.reports))

    def fail(self, error: DisaggError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class _Line:
    """One worker's connection: the bytes read so far, and what it announced."""

    read: bytes = b""
    awaited: Awaited | None = None
    parts: int = 0
    reported: bool = False


class Reports:
    """Listens for reports on one thread. `expect` and `drop` may be called on any.

    A worker whose connection ends before its report has died: its prompt fails with PeerLost at once.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self.address = KVAddress(host, int(self._listener.getsockname()[1]))
        self._lock = threading.Lock()
        self._awaited: dict[str, Awaited] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-reports", daemon=True)
        self._thread.start()

    @property
    def outstanding(self) -> int:
        """Prompts whose reports are awaited."""
        return len(self._awaited)

    def expect(self, id: str) -> Awaited:
        """Await the reports of the order with this id, until `drop`."""
        awaited = Awaited(id)
        with self._lock:
            self._awaited[id] = awaited
        return awaited

    def drop(self, awaited: Awaited) -> None:
        """Await nothing more; workers that still send the prompt's KV give it up. May be called twice."""
        with self._lock:
            self._awaited.pop(awaited.id, None)
            connections = list(awaited.connections)
        for sock in connections:
            with contextlib.suppress(OSError):  # it has ended by itself
                sock.shutdown(socket.SHUT_RDWR)  # the reading thread then closes it

    def close(self) -> None:
        """End the thread and every connection."""
        self._closing = True
        self._thread.join(2 * POLL_S + 1)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(POLL_S):
                if key.data is None:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj, key.data)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, _Line())

    def _read(self, sock: socket.socket, line: _Line) -> None:
        try:
            data = sock.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line.read += data
        try:
            while b"\n" in line.read:
                first, _, line.read = line.read.partition(b"\n")
                self._take(sock, line, first)
        except InvalidValue:
            data = b""
        if not data or len(line.read) > MAX_LINE_BYTES:
            self._end(sock, line)

    def _take(self, sock: socket.socket, line: _Line, text: bytes) -> None:
        """One line: a hello, then a report. InvalidValue if it is neither, or of no prompt that is awaited."""
        if line.awaited is not None:
            line.reported = True
            line.awaited.add(KVReport.from_bytes(text), line.parts)
            return
        hello = ReportHello.from_bytes(text)
        with self._lock:
            awaited = self._awaited.get(hello.id)
            if awaited is None:
                raise InvalidValue("no such order")
            awaited.connections.append(sock)
        line.awaited, line.parts = awaited, hello.parts

    def _end(self, sock: socket.socket, line: _Line) -> None:
        self._selector.unregister(sock)
        if line.awaited is not None:
            with self._lock:
                line.awaited.connections.remove(sock)
            if not line.reported:
                line.awaited.fail(PeerLost("a worker of vLLM ended while it sent KV", "see the server's log"))
        sock.close()
