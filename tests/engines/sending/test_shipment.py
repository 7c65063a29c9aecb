"""disagg/engines/sending/shipment.py and reports.py: a worker sends one prompt's KV, the engine learns how it ended."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from disagg import logs
from disagg.api.delivery import KVOrder, KVProgress, KVReport, ReportHello
from disagg.api.requests import KVAddress
from disagg.engines.sending.reports import Awaited, Reports
from disagg.engines.sending.runs import combined
from disagg.engines.sending.shipment import Shipment, report_failure
from disagg.errors import Cancelled, DisaggError, HandoffError, ModelError, PeerLost, TicketRefused
from disagg.kv.parts import WHOLE, Part
from disagg.kv.receive.tickets import IssuedTicket
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from tests.deadlines import wait_until
from tests.kv.kv_parts import PATIENCE_S, Cache, Receiver, header_for, mixed_layout, start_receiver
from tests.values import of_type


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = start_receiver()
    yield receiver
    receiver.server.close()


@pytest.fixture
def reports() -> Iterator[Reports]:
    before = set(threading.enumerate())
    reports = Reports()
    yield reports
    reports.close()
    wait_until(lambda: not {t for t in threading.enumerate() if t.name.startswith("kv-")} - before)


def order(receiver: Receiver, reports: Reports, slot: IssuedTicket, awaited: Awaited) -> KVOrder:
    return KVOrder(
        id=awaited.id,
        report=reports.address,
        deliver=KVAddress(receiver.server.host, receiver.server.port),
        ticket=slot.ticket,
        request_id="r1",
        next_token=0,
        deadline_s=PATIENCE_S,
    )


def send(shipment: Shipment, cache: Cache, part: Part = WHOLE) -> None:
    for block in cache.blocks(part=part):
        shipment.send(block)
    shipment.computed()


def test_the_engine_learns_what_a_transfer_took(receiver: Receiver, reports: Reports) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    send(Shipment(order(receiver, reports, slot, awaited), header_for(slot)), cache)
    (report,) = awaited.done.result(PATIENCE_S)
    kv = of_type(receiver.result(slot), ReceivedKV)
    assert cache.matches(kv)
    kv.release()
    assert report.kv_bytes == cache.layout.nbytes(9)
    reports.drop(awaited)
    assert reports.outstanding == 0


def test_rows_that_the_device_computes_later_are_computed_when_it_has_done_so(
    receiver: Receiver, reports: Reports
) -> None:
    """The time of the transfer beside the computation ends then, and not when the rows were queued."""
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    shipment = Shipment(order(receiver, reports, slot, awaited), header_for(slot))
    for block in cache.blocks():
        shipment.send(block)
    ready: list[float] = []

    def wait() -> None:
        time.sleep(0.05)
        ready.append(time.monotonic())

    shipment.computed(wait)
    (report,) = awaited.done.result(PATIENCE_S)
    of_type(receiver.result(slot), ReceivedKV).release()
    assert awaited.computed is not None and awaited.computed >= ready[0]
    assert report.exposed_s <= time.monotonic() - ready[0]


@pytest.mark.parametrize("share", [1.0, 0.25, 0.0])
def test_what_is_sent_in_a_prompts_steps_is_hidden_by_its_share_of_them(
    share: float, receiver: Receiver, reports: Reports
) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    shipment = Shipment(order(receiver, reports, slot, awaited), header_for(slot))
    blocks = cache.blocks()
    began = time.monotonic()
    shipment.step(KVProgress(0, 9, share))
    shipment.send(next(blocks))
    wait_until(lambda: shipment._transfer.queued_bytes == 0)
    shipment.end_step()
    took, inside = time.monotonic() - began, len(shipment._transfer._spans)
    for block in blocks:  # in a step of others
        shipment.send(block)
    wait_until(lambda: shipment._transfer.queued_bytes == 0)
    shipment.computed()
    (report,) = awaited.done.result(PATIENCE_S)
    of_type(receiver.result(slot), ReceivedKV).release()
    spans = shipment._transfer.finish().spans
    assert report.hidden_s == pytest.approx(share * sum(span.ended - span.began for span in spans[:inside]))
    assert report.hidden_s <= share * took


def test_a_transfer_of_two_workers_takes_as_long_as_the_one_that_is_waited_for() -> None:
    early, late = KVReport(kv_bytes=7, hidden_s=1.0, exposed_s=0.1), KVReport(kv_bytes=7, hidden_s=0.8, exposed_s=0.4)
    sent = combined([early, late])
    assert (sent.payload_bytes, sent.hidden_s, sent.exposed_s) == (14, 0.8, 0.4)


def test_a_transfer_of_two_workers_is_done_when_both_have_reported(receiver: Receiver, reports: Reports) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    halves = (Part(heads=(0, 1)), Part(heads=(1, 3), states=False))
    shipments = [
        Shipment(order(receiver, reports, slot, awaited), header_for(slot, part=part, parts=2)) for part in halves
    ]
    send(shipments[0], cache, halves[0])
    assert not awaited.done.done()
    send(shipments[1], cache, halves[1])
    sent = combined(awaited.done.result(PATIENCE_S))
    of_type(receiver.result(slot), ReceivedKV).release()
    assert sent.payload_bytes == cache.layout.nbytes(9)


def test_a_refused_transfer_is_reported_with_the_decode_hosts_reason(receiver: Receiver, reports: Reports) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    header = replace(header_for(slot), ticket="another ticket")
    send(Shipment(order(receiver, reports, slot, awaited), header), cache)
    with pytest.raises(TicketRefused):
        awaited.done.result(PATIENCE_S)


def test_a_prompt_that_the_engine_drops_is_given_up_on_every_worker(receiver: Receiver, reports: Reports) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    Shipment(order(receiver, reports, slot, awaited), header_for(slot))
    wait_until(lambda: bool(awaited.connections) and slot.state == "claimed")
    reports.drop(awaited)
    assert isinstance(receiver.result(slot), DisaggError)
    wait_until(receiver.settled)


def test_a_prompt_that_vllm_drops_is_given_up(receiver: Receiver, reports: Reports) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    shipment = Shipment(order(receiver, reports, slot, awaited), header_for(slot))
    wait_until(lambda: slot.state == "claimed")
    shipment.abort()
    with pytest.raises(Cancelled):
        awaited.done.result(PATIENCE_S)
    assert isinstance(receiver.result(slot), DisaggError)


class LateShipment(Shipment):
    """Finishes once its other thread has seen everything that has happened."""

    def _finish(self) -> None:
        wait_until(lambda: self._woken.fileno() < 0 or not select.select([self._woken], [], [], 0)[0])
        super()._finish()


def test_a_prompt_that_fails_in_every_layer_is_reported_with_its_first_failure(
    receiver: Receiver, reports: Reports
) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    shipment = LateShipment(order(receiver, reports, slot, awaited), header_for(slot))
    for layer in range(48):
        shipment.fail(ModelError(f"layer {layer} cannot be read"))
    shipment.computed()
    with pytest.raises(ModelError, match="layer 0"):
        awaited.done.result(PATIENCE_S)
    wait_until(receiver.settled)


def test_a_shipment_that_cannot_be_made_leaves_nothing_and_is_reported(
    receiver: Receiver, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    wanted = order(receiver, reports, slot, awaited)
    opened: list[Transfer] = []

    def no_thread(*args: object, **options: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    def transfer(*args: Any, **options: Any) -> Transfer:
        opened.append(Transfer(*args, **options))
        return opened[0]

    with monkeypatch.context() as patched:
        patched.setattr("disagg.engines.sending.shipment.Transfer", transfer)
        # The shipment's own threads only: the receiver, which is in this process, needs one for the transfer.
        patched.setattr("disagg.engines.sending.shipment.threading", SimpleNamespace(Thread=no_thread))
        with pytest.raises(RuntimeError, match="new thread"):
            Shipment(wanted, header_for(slot))
    assert isinstance(opened[0].failed, Cancelled)
    report_failure(wanted, 1, HandoffError("no threads are left"))
    with pytest.raises(HandoffError, match="no threads are left"):
        awaited.done.result(PATIENCE_S)
    wait_until(receiver.settled)


def test_an_engine_that_cannot_be_reached_is_logged_with_its_address(
    receiver: Receiver, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = KVAddress(*server.getsockname())
    Shipment(msgspec.structs.replace(order(receiver, reports, slot, awaited), report=nobody), header_for(slot))

    def logged() -> list[logging.LogRecord]:
        return [one for one in caplog.records if one.name == logs.log.name]

    wait_until(lambda: bool(logged()))
    (record,) = logged()
    message = record.fields["message"]  # type: ignore[attr-defined]  # of logs.event
    assert record.getMessage() == "kv_report_failed" and f"{nobody.host}:{nobody.port}" in message


def test_descriptors_above_1023_are_waited_for(
    receiver: Receiver, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise ValueError("filedescriptor out of range in select()")

    cache = Cache.random(mixed_layout(), 9)
    slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen")
    shipped = SimpleNamespace(select=refused, poll=select.poll, POLLIN=select.POLLIN)
    monkeypatch.setattr("disagg.engines.sending.shipment.select", shipped)
    send(Shipment(order(receiver, reports, slot, awaited), header_for(slot)), cache)
    awaited.done.result(PATIENCE_S)
    of_type(receiver.result(slot), ReceivedKV).release()


def test_a_worker_that_dies_fails_its_prompt_at_once(reports: Reports) -> None:
    awaited = reports.expect("an id of sixteen")
    with socket.create_connection((reports.address.host, reports.address.port)) as worker:
        worker.sendall(ReportHello(awaited.id, 2).to_bytes() + b"\n")
        wait_until(lambda: bool(awaited.connections))
    with pytest.raises(PeerLost, match="a worker of vLLM ended while it sent KV"):
        awaited.done.result(PATIENCE_S)


@pytest.mark.parametrize("said", [b"{}\n", b"not JSON\n", b'{"id": "of nobody", "parts": 1}\n', b"x" * (1 << 17)])
def test_who_does_not_know_an_order_is_disconnected(reports: Reports, said: bytes) -> None:
    with socket.create_connection((reports.address.host, reports.address.port), timeout=PATIENCE_S) as stranger:
        try:
            stranger.sendall(said)
            assert stranger.recv(1) == b""
        except ConnectionError:
            pass


def test_a_report_in_pieces_is_one_report(reports: Reports) -> None:
    awaited = reports.expect("an id of sixteen")
    line = ReportHello(awaited.id, 1).to_bytes() + b"\n" + KVReport(kv_bytes=7).to_bytes() + b"\n"
    with socket.create_connection((reports.address.host, reports.address.port)) as worker:
        for at in range(0, len(line), 5):
            worker.sendall(line[at : at + 5])
            time.sleep(0)
        assert [report.kv_bytes for report in awaited.done.result(PATIENCE_S)] == [7]


def test_the_steps_of_a_prompt_are_reported_if_its_order_asks_for_it(receiver: Receiver, reports: Reports) -> None:
    cache = Cache.random(mixed_layout(), 9)
    for asked in (True, False):
        steps: list[KVProgress] = []
        slot, awaited = receiver.issue(cache), reports.expect("an id of sixteen", steps.append)
        shipment = Shipment(
            msgspec.structs.replace(order(receiver, reports, slot, awaited), progress=asked), header_for(slot)
        )
        shipment.step(KVProgress(0, 9, 1.0))
        send(shipment, cache)
        awaited.done.result(PATIENCE_S)
        of_type(receiver.result(slot), ReceivedKV).release()
        assert steps == [KVProgress(0, 9, 1.0)] * asked
        reports.drop(awaited)
