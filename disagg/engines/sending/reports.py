"""What the workers of an engine report about the KV that they send, in the process of the engine."""

from __future__ import annotations

import contextlib
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from disagg import logs
from disagg.api.base import InvalidValue
from disagg.api.delivery import MAX_LINE_BYTES, KVOrder, KVProgress, KVReport, ReportHello
from disagg.api.requests import KVAddress
from disagg.errors import DisaggError, PeerLost
from disagg.kv.frames import Header

POLL_S = 0.5
HELLO_S = 5.0  # for a worker's first line
PAUSE_S = 0.5  # after a connection that could not be accepted


@dataclass(slots=True, eq=False)
class Awaited:
    """The reports that are awaited of one prompt. done: all of them, one per part, or the first error. Whichever thread
    comes second changes nothing. on_step: called on the reading thread for each step that a worker begins; it must not
    block. computed: when all rows were, by time.monotonic() here; None until `done` has the reports."""

    id: str
    done: Future[Sequence[KVReport]] = field(default_factory=Future)
    reports: list[KVReport] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    computed: float | None = None
    on_step: Callable[[KVProgress], None] = lambda progress: None
    _latest: float = -math.inf

    def add(self, report: KVReport, parts: int, now: float | None = None) -> None:
        self.reports.append(report)
        self._latest = max(self._latest, (time.monotonic() if now is None else now) - report.exposed_s)
        if report.error is not None:
            self.fail(DisaggError.from_json(dict(report.error)))
        elif len(self.reports) == parts:
            self.computed = self._latest
            with contextlib.suppress(InvalidStateError):
                self.done.set_result(tuple(self.reports))

    def fail(self, error: DisaggError) -> None:
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class _WorkerConnection:
    """since: when it was accepted. read: the bytes of an incomplete line. awaited, parts: what its hello stated.
    reported: whether its report has come."""

    since: float
    read: bytes = b""
    awaited: Awaited | None = None
    parts: int = 0
    reported: bool = False


class Reports:
    """Listens for reports on one thread. `expect` and `drop` may be called on any.

    If a worker's connection ends before its report, its prompt fails with PeerLost at once. hello_s: a worker has so
    long for its first line. pause_s: it does not listen for so long after a connection that could not be accepted."""

    def __init__(self, host: str = "127.0.0.1", *, hello_s: float = HELLO_S, pause_s: float = PAUSE_S) -> None:
        self._hello_s, self._pause_s = hello_s, pause_s
        self._listen_from: float | None = None  # while it does not listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=256)
        self._listener.setblocking(False)
        self.address = KVAddress(host, int(self._listener.getsockname()[1]))
        self._lock = threading.Lock()
        self._awaited: dict[str, Awaited] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-reports", daemon=True)
        self._thread.start()

    @property
    def outstanding(self) -> int:
        """Prompts whose reports are awaited."""
        return len(self._awaited)

    def expect(self, id: str, on_step: Callable[[KVProgress], None] = lambda progress: None) -> Awaited:
        """Await the reports of the order with this id, until `drop`. on_step: see Awaited."""
        awaited = Awaited(id, on_step=on_step)
        with self._lock:
            self._awaited[id] = awaited
        return awaited

    @contextlib.contextmanager
    def expecting(self, on_step: Callable[[KVProgress], None] = lambda progress: None) -> Iterator[Awaited]:
        """`expect` of a new order, which is passed on in the block; `drop` if the block fails."""
        awaited = self.expect(secrets.token_urlsafe(24), on_step)
        try:
            yield awaited
        except BaseException:  # whatever it is: nobody waits for the reports any more
            self.drop(awaited)
            raise

    def order(
        self,
        awaited: Awaited,
        to: tuple[str, int],
        header: Header,
        *,
        deadline: float,
        next_token: int,
        progress: bool = False,
    ) -> KVOrder:
        """The order to send the KV of `header` to the decode host at `to`, and to report here. deadline, next_token: as
        in SendingEngine.send. progress: steps are reported, too."""
        return KVOrder(
            id=awaited.id,
            report=self.address,
            deliver=KVAddress(*to),
            ticket=header.ticket,
            request_id=header.request_id,
            next_token=next_token,
            start=header.start,
            wire=header.wire,
            deadline_s=max(0.001, deadline - time.monotonic()),
            progress=progress,
            sender=header.sender,
            weights=header.weights,
        )

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
        self._wake.close()  # the thread reads the end of it
        self._thread.join(2 * POLL_S + 1)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(POLL_S):
                if key.data is None:
                    self._accept()
                elif key.data is not self._woken:
                    self._serve(key)
            self._sweep(time.monotonic())
        for sock, _ in self._workers():
            sock.close()
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _workers(self) -> list[tuple[socket.socket, _WorkerConnection]]:
        return [
            (key.fileobj, key.data)
            for key in list(self._selector.get_map().values())
            if isinstance(key.fileobj, socket.socket) and isinstance(key.data, _WorkerConnection)
        ]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone
            return
        except OSError as error:  # out of descriptors: the worker stays in the backlog
            logs.log.error("kv_report_refused", extra={"fields": {"message": str(error)}})
            self._selector.unregister(self._listener)
            self._listen_from = time.monotonic() + self._pause_s
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _WorkerConnection(time.monotonic()))

    def _sweep(self, now: float) -> None:
        """Listen again after a pause, and end connections without a hello."""
        if self._listen_from is not None and now >= self._listen_from:
            self._listen_from = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for sock, worker in self._workers():
            if worker.awaited is None and now >= worker.since + self._hello_s:
                self._end(sock, worker)

    def _serve(self, key: selectors.SelectorKey) -> None:
        """Read from one connection. A defect ends it, and not the thread."""
        assert isinstance(key.fileobj, socket.socket)
        try:
            self._read(key.fileobj, key.data)
        except Exception:  # noqa: BLE001 - no prompt's end would be seen any more
            logs.log.exception("kv_report_failed")
            self._end(key.fileobj, key.data)

    def _read(self, sock: socket.socket, worker: _WorkerConnection) -> None:
        try:
            data = sock.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        worker.read += data
        try:
            while b"\n" in worker.read:
                first, _, worker.read = worker.read.partition(b"\n")
                self._take(sock, worker, first)
        except InvalidValue:
            data = b""
        if not data or len(worker.read) > MAX_LINE_BYTES:
            self._end(sock, worker)

    def _take(self, sock: socket.socket, worker: _WorkerConnection, text: bytes) -> None:
        """One line: a hello, then a report. InvalidValue if it is neither, or of no prompt that is awaited."""
        if worker.awaited is not None:
            report = KVReport.from_bytes(text)
            if report.progress is not None:
                worker.awaited.on_step(report.progress)
                return
            worker.awaited.add(report, worker.parts)
            worker.reported = True
            return
        hello = ReportHello.from_bytes(text)
        with self._lock:
            awaited = self._awaited.get(hello.id)
            if awaited is None:
                raise InvalidValue("no such order")
            awaited.connections.append(sock)
        worker.awaited, worker.parts = awaited, hello.parts

    def _end(self, sock: socket.socket, worker: _WorkerConnection) -> None:
        self._selector.unregister(sock)
        if worker.awaited is not None:
            with self._lock:
                worker.awaited.connections.remove(sock)
            if not worker.reported:
                worker.awaited.fail(PeerLost("a worker of vLLM ended while it sent KV", "see the server's log"))
        sock.close()
