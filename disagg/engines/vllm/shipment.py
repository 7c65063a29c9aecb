"""One prompt's KV on its way from one worker of vLLM to the decode host."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from msgspec import structs

from disagg.api.delivery import KVOrder, KVReport, ReportHello
from disagg.errors import Cancelled, DisaggError, HandoffError
from disagg.kv.blocks import Block
from disagg.kv.send import Transfer
from disagg.kv.wire.frames import Header

CONNECT_S = 3.0


class Shipment:
    """A Transfer, and the connection on which its end is reported. Called on the worker's thread; no call waits.

    Nothing here raises into vLLM, whose whole engine would end: a failure is reported, and the rest of the prompt's
    blocks are dropped.
    """

    def __init__(self, order: KVOrder, header: Header) -> None:
        self._order = order
        self._figures = KVReport()
        self._computed = 0.0  # when the last rows were computed
        self._failure: DisaggError | None = None
        self._deadline = time.monotonic() + order.deadline_s
        self._transfer = Transfer(order.deliver.host, order.deliver.port, header, deadline=self._deadline)
        self._parts = header.parts
        self._wake, self._woken = socket.socketpair()
        self._report: KVReport | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-report-{order.request_id}", daemon=True)
        self._thread.start()

    @property
    def start(self) -> int:
        """The first token whose KV is wanted."""
        return self._order.start

    def send(self, block: Block) -> None:
        """Queue a block, unless the transfer has failed."""
        if self._failure is None:
            try:
                self._transfer.send(block)
            except DisaggError as error:
                self.fail(error)

    def computed(self, seconds: float, held: int) -> None:
        """All rows are queued: finish, and report. seconds: spent computing this prompt."""
        self._computed = time.monotonic()
        self._figures = structs.replace(self._figures, compute_s=seconds, held=held)
        self._end()

    def fail(self, error: DisaggError) -> None:
        """End with this error, unless one came before."""
        self._failure = self._failure or error
        self._end()

    def abort(self) -> None:
        """Give the prompt up: vLLM has dropped it."""
        self.fail(Cancelled("vLLM dropped the request before its KV was complete"))

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._wake.send(b"\0")

    def _run(self) -> None:
        """On the shipment's thread: until the end of the prompt, or until the engine closes the connection."""
        try:
            address = (self._order.report.host, self._order.report.port)
            with socket.create_connection(address, timeout=CONNECT_S) as sock:
                sock.sendall(ReportHello(self._order.id, self._parts).to_bytes() + b"\n")
                self._watch(sock)
                threading.Thread(target=self._finish, name="kv-finish", daemon=True).start()
                self._watch(sock)
                assert self._report is not None
                sock.sendall(self._report.to_bytes() + b"\n")
        except OSError:  # nobody waits for this prompt any more
            self._failure = self._failure or Cancelled("the engine that ordered this KV gave it up")
        finally:
            self._transfer.abort()
            self._wake.close()
            self._woken.close()

    def _watch(self, sock: socket.socket) -> None:
        """Wait for `_end`. The engine writes nothing: what can be read of its connection is the end of it."""
        left = self._deadline - time.monotonic()
        ready, _, _ = select.select([sock, self._woken], [], [], max(0.0, left))
        if self._woken not in ready:
            raise ConnectionResetError("the engine closed its connection, or the deadline has passed")
        self._woken.recv(1)

    def _finish(self) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            result = self._transfer.finish()
            self._report = structs.replace(
                self._figures,
                kv_bytes=result.payload_bytes,
                hidden_s=result.hidden_s(self._computed),
                exposed_s=result.exposed_s(self._computed),
                link_bytes_s=result.link_bytes_s,
            )
        except DisaggError as error:
            self._report = KVReport(error=error.to_json())
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine is told
            self._report = KVReport(error=HandoffError(f"the KV could not be sent: {error!r}").to_json())
        self._end()
