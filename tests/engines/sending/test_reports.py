"""disagg/engines/sending/reports.py: no connection and no other thread ends the thread that reads reports."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing

import pytest

from disagg.api.delivery import KVReport, ReportHello
from disagg.engines.sending.reports import Awaited, Reports
from disagg.errors import Cancelled, PeerLost
from tests.deadlines import wait_until
from tests.kv.kv_parts import PATIENCE_S


@pytest.fixture
def reports() -> Iterator[Reports]:
    with closing(Reports(pause_s=60.0)) as reports:
        yield reports


def connected(reports: Reports) -> socket.socket:
    return socket.create_connection((reports.address.host, reports.address.port), timeout=PATIENCE_S)


def hello(reports: Reports, worker: socket.socket, id: str = "an id of sixteen") -> Awaited:
    """A worker has announced itself."""
    awaited = reports.expect(id)
    worker.sendall(ReportHello(id, 1).to_bytes() + b"\n")
    wait_until(lambda: bool(awaited.connections))
    return awaited


def loopbacks() -> list[str]:
    """The loopback addresses of this machine, which may have no IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return ["127.0.0.1"]
    return ["127.0.0.1", "::1"]


@pytest.mark.parametrize("host", loopbacks())
def test_reports_come_by_the_protocol_of_the_address_that_reaches_the_server(host: str) -> None:
    with closing(Reports(host)) as reports, connected(reports) as worker:
        hello(reports, worker)


class SettledMeanwhile(Future[Sequence[KVReport]]):
    """Another thread settles it after each look at it."""

    def done(self) -> bool:
        return False


def test_of_two_threads_that_end_a_prompt_the_first_counts_and_neither_fails() -> None:
    awaited = Awaited("an id of sixteen", SettledMeanwhile())
    awaited.fail(Cancelled("first"))
    awaited.fail(PeerLost("second"))
    awaited.add(KVReport(kv_bytes=7), 1)
    with pytest.raises(Cancelled, match="first"):
        awaited.done.result(0)


def test_a_defect_ends_one_connection_and_the_others_are_read(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(self: Awaited, report: KVReport, parts: int) -> None:
        raise ValueError("a defect")

    with connected(reports) as first, connected(reports) as second:
        broken, other = hello(reports, first), hello(reports, second, "another id, sixteen")
        with monkeypatch.context() as patched:
            patched.setattr(Awaited, "add", defect)
            first.sendall(KVReport().to_bytes() + b"\n")
            assert first.recv(1) == b""
        second.sendall(KVReport(kv_bytes=7).to_bytes() + b"\n")
        assert [report.kv_bytes for report in other.done.result(PATIENCE_S)] == [7]
        with pytest.raises(PeerLost):
            broken.done.result(PATIENCE_S)


class OutOfDescriptors:
    """A listener that accepts nothing."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.tried = 0

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        self.tried += 1
        raise OSError(24, "Too many open files")

    def close(self) -> None:
        self._listener.close()


def test_without_descriptors_it_listens_again_after_a_pause_and_reads_on_meanwhile(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [connected(reports) for _ in range(20)]
    prompts = [hello(reports, line, f"id {n:02} of sixteen") for n, line in enumerate(lines)]
    listener = OutOfDescriptors(reports._listener)
    monkeypatch.setattr(reports, "_listener", listener)
    with connected(reports):
        wait_until(lambda: listener.tried > 0)
        for line, awaited in zip(lines, prompts, strict=True):
            line.sendall(KVReport().to_bytes() + b"\n")
            awaited.done.result(PATIENCE_S)
            line.close()
    assert listener.tried == 1


def test_it_listens_again_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Reports(pause_s=0.0)) as reports:
        listener = OutOfDescriptors(reports._listener)
        monkeypatch.setattr(reports, "_listener", listener)
        with connected(reports):
            wait_until(lambda: listener.tried > 1)


def test_who_connects_and_says_nothing_is_disconnected() -> None:
    with closing(Reports(hello_s=0.0)) as reports, connected(reports) as stranger:
        assert stranger.recv(1) == b""
