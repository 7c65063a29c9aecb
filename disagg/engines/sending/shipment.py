"""One prompt's KV on its way from one worker of vLLM to the decode host."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from disagg import logs
from disagg.api.delivery import KVOrder, KVProgress, KVReport, ReportHello
from disagg.errors import Cancelled, DisaggError, HandoffError
from disagg.kv.blocks import Block
from disagg.kv.frames import Header
from disagg.kv.sent import ComputeStep
from disagg.kv.transfer import Transfer

CONNECT_S = 3.0
MAX_PROGRESS = 64  # steps that are not reported yet


class Shipment:
    """A Transfer, and the connection on which its end is reported. Called on the worker's thread; no call waits.

    Once it is made, nothing here raises into vLLM, whose whole engine would end: a failure is reported, and the rest of
    the prompt's blocks are dropped. To make one raises OSError without descriptors and RuntimeError without threads.
    """

    def __init__(self, order: KVOrder, header: Header, beats: Callable[[], int] = lambda: 0) -> None:
        """beats: how many pieces of work the worker has finished; the transfer states them while it sends nothing."""
        self._order = order
        self._steps: list[ComputeStep] = []
        self._running: tuple[float, float] | None = None  # when the prompt's newest step began, and its share of it
        self._computed: float | None = None  # when the last rows were queued, after which `_wait` waits for them
        self._wait: Callable[[], None] | None = None
        self._failure: DisaggError | None = None
        self._deadline = time.monotonic() + order.deadline_s
        self._parts = header.parts
        self._report: KVReport | None = None
        self._progress: deque[KVProgress] = deque(maxlen=MAX_PROGRESS)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)  # a byte too many in it is not needed
        with contextlib.ExitStack() as undo:
            undo.callback(self._wake.close)
            undo.callback(self._woken.close)
            self._transfer = Transfer(
                order.deliver.host, order.deliver.port, header, deadline=self._deadline, beats=beats
            )
            undo.callback(self._transfer.abort)
            self._thread = threading.Thread(target=self._run, name=f"kv-report-{order.request_id}", daemon=True)
            self._thread.start()
            undo.pop_all()

    def send(self, block: Block) -> None:
        """Queue a block, unless the transfer has failed."""
        if self._failure is None:
            try:
                self._transfer.send(block)
            except DisaggError as error:
                self.fail(error)

    def step(self, progress: KVProgress) -> None:
        """A step of the prompt has begun. It is reported to the engine if the order asks for that."""
        self._running = time.monotonic(), progress.share
        if self._order.progress:
            self._progress.append(progress)
            self._notify()

    def end_step(self) -> None:
        """The prompt's newest step has ended, if that was not known yet."""
        if self._running is not None:
            (began, share), self._running = self._running, None
            self._steps.append(ComputeStep(began, time.monotonic(), share))

    def computed(self, wait: Callable[[], None] | None = None) -> None:
        """All rows are queued: finish, and report. wait: until they are computed, if the device does that later; called
        on a thread of the shipment."""
        if self._failure is None:
            self._wait, self._computed = wait, time.monotonic()
            self._notify()

    def fail(self, error: DisaggError) -> None:
        """End with this error, unless one came before."""
        if self._failure is None:
            self._failure = error
            self._notify()

    def abort(self) -> None:
        """Give the prompt up: vLLM has dropped it."""
        self.fail(Cancelled("vLLM dropped the request before its KV was complete"))

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._wake.send(b"\0")

    def _run(self) -> None:
        """Report to the engine until the end of the prompt, or until it closes the connection. On the shipment's
        thread."""
        try:
            with self._connect() as sock:
                sock.sendall(ReportHello(self._order.id, self._parts).to_bytes() + b"\n")
                self._watch(sock, lambda: self._failure is not None or self._computed is not None)
                threading.Thread(target=self._finish, name="kv-finish", daemon=True).start()
                self._watch(sock, lambda: self._report is not None)
                assert self._report is not None
                self._tell_steps(sock)  # if all was over before the first look
                sock.sendall(self._report.to_bytes() + b"\n")
        except OSError:  # nobody waits for this prompt any more
            self._failure = self._failure or Cancelled("the engine that ordered this KV gave it up")
        finally:
            self._transfer.abort()
            self._wake.close()
            self._woken.close()

    def _connect(self) -> socket.socket:
        """A connection to the engine that gave the order. A failure is logged, since it cannot be reported: the
        engine's address is wrong from here if vLLM runs in a container."""
        address = self._order.report
        try:
            return socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        except OSError as error:
            message = f"the engine that ordered this KV cannot be reached at {address.host}:{address.port}: {error}"
            fields = {"message": message, "request": self._order.request_id}
            logs.log.error("kv_report_failed", extra={"fields": fields})
            raise

    def _watch(self, sock: socket.socket, until: Callable[[], bool]) -> None:
        """Wait until this holds; `_notify` is called when it may. The engine writes nothing: what can be read of its
        connection is the end of it."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(sock, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not until():
            left = self._deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000))
            if self._woken.fileno() not in ready:
                raise ConnectionResetError("the engine closed its connection, or the deadline has passed")
            self._woken.recv(16)
            self._tell_steps(sock)

    def _tell_steps(self, sock: socket.socket) -> None:
        while self._progress:
            sock.sendall(KVReport(progress=self._progress.popleft()).to_bytes() + b"\n")

    def _finish(self) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            assert self._computed is not None
            if self._wait is not None:
                self._wait()
                self._computed = time.monotonic()
            if self._running is not None:
                self._steps.append(ComputeStep(self._running[0], self._computed, self._running[1]))
            sent = self._transfer.finish().sent(self._computed, self._steps)
            self._report = KVReport(
                kv_bytes=sent.payload_bytes,
                hidden_s=sent.hidden_s,
                exposed_s=sent.exposed_s,
                link_bytes_s=sent.link_bytes_s,
            )
        except DisaggError as error:
            self._report = KVReport(error=error.to_json())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            self._report = KVReport(error=HandoffError(f"the KV could not be sent: {error!r}").to_json())
        self._notify()


def report_failure(order: KVOrder, parts: int, error: DisaggError) -> None:
    """Report to the engine that this prompt's KV will not come. If that fails, too, the prompt ends at its deadline."""
    lines = (ReportHello(order.id, parts), KVReport(error=error.to_json()))
    try:
        with socket.create_connection((order.report.host, order.report.port), timeout=CONNECT_S) as sock:
            sock.sendall(b"".join(line.to_bytes() + b"\n" for line in lines))
    except OSError as failure:
        message = f"{error}; it could not be reported: {failure}"
        logs.log.error("kv_not_sent", extra={"fields": {"message": message, "request": order.request_id}})
