import errno
import gc
import itertools
import json
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import AS_IS, INT8, KV_WHOLE, WireForm
from disagg.errors import (
    MAX_ERROR_CHARS,
    Cancelled,
    DisaggError,
    FingerprintMismatch,
    FleetError,
    IntegrityError,
    LayoutMismatch,
    PeerLost,
    PortInUse,
    ProtocolError,
    TicketRefused,
)
from disagg.kv import frames
from disagg.kv.frames import Kind
from disagg.kv.preamble import (
    MAGIC,
    NONCE_BYTES,
    OPENING,
    PREAMBLE,
    PROOF,
    PROOF_BYTES,
    encode_preamble,
    encode_proof,
)
from disagg.kv.receive import KVServer, ReceiveLimits
from disagg.kv.receive.tickets import IssuedTicket, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import SendLimits, Transfer
from tests.deadlines import ends_by_itself, wait_until
from tests.kv.kv_parts import (
    FINGERPRINT,
    PATIENCE_S,
    Cache,
    Parts,
    Receiver,
    groups_layout,
    header_for,
    introduce,
    mixed_layout,
    opened,
    parts_of,
    read_replies,
    read_reply,
    start_receiver,
    stream,
)

CACHE = Cache.random(mixed_layout(), 10)
QUICK = ReceiveLimits(preamble_s=0.3, proof_s=0.3, header_s=0.3, stall_s=0.3, linger_s=0.3)


def test_a_transfer_is_acknowledged_with_its_size_and_the_time_it_took(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    accepted, acknowledged = receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
    assert accepted == {"ok": True}
    assert acknowledged["received_bytes"] == CACHE.layout.nbytes(10)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    timing = kv.timing
    assert timing.claimed <= timing.first_byte <= timing.last_byte <= timing.accepted <= time.monotonic()
    assert acknowledged["receive_s"] == pytest.approx(timing.last_byte - timing.first_byte)
    kv.release()


def header_with(slot: IssuedTicket, **changes: Any) -> bytes:
    """Proof and header for a slot, some of its fields replaced by what a hostile peer likes."""
    body = json.loads(frames.encode_header(header_for(slot)))
    return opened(json.dumps({**body, **changes}).encode())


LONG = "x" * 200_000
ODD_LAYER = {"kind": LONG, "kv_heads": 1, "key_dim": 1, "value_dim": 1, "window": None, "states": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": {"dtype": LONG, "layers": []}},
        {"layout": {"dtype": "float32", "layers": [ODD_LAYER]}},
        {"layout": {"dtype": "float32", "layers": [{**ODD_LAYER, "kind": "full", "kv_heads": LONG}]}},
        {"layout": LONG},
        {"fingerprint": LONG},
        {"tokens": LONG},
        {"wire": LONG},
        {"part": LONG},
        {"part": {"layers": [LONG], "heads": None, "states": True}},
        {"parts": LONG},
    ],
)
def test_a_malformed_header_fails_its_request_with_a_short_line_in_the_log(
    receiver: Receiver, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    slot = receiver.issue(CACHE)
    (refused,) = receiver.exchange(header_with(slot, **changes), slot.ticket)
    assert refused["error"]["code"] == "ProtocolError"
    assert isinstance(receiver.result(slot), ProtocolError)
    assert "KV transfer of request r1 failed" in caplog.text and len(caplog.text) < 500


def test_without_a_valid_ticket_the_header_is_neither_awaited_nor_parsed(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.kv.frames.decode_header", lambda *_: pytest.fail("the header was parsed"))
    (refused,) = receiver.exchange(opened(b"x" * 99), "nobody issued this")
    assert refused["error"]["code"] == "TicketRefused"


def test_the_differences_of_a_ticket_holder_are_quoted_in_short(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    receiver.exchange(
        stream(replace(header_for(slot), fingerprint=structs.replace(FINGERPRINT, rope=LONG)), []), slot.ticket
    )
    error = receiver.result(slot)
    assert isinstance(error, FingerprintMismatch) and "rope: decode " in error.message and len(error.message) < 500


@pytest.mark.parametrize(("allowed", "offered"), [(AS_IS, INT8), (INT8, AS_IS)])
def test_a_form_that_the_ticket_does_not_allow_is_refused(
    receiver: Receiver, allowed: WireForm, offered: WireForm
) -> None:
    slot = receiver.issue(Cache.random(groups_layout(), 5, wire=allowed))
    (refused,) = receiver.exchange(opened(header_for(slot, wire=offered)), slot.ticket)
    assert refused["error"]["code"] == "LayoutMismatch"
    error = receiver.result(slot)
    assert isinstance(error, LayoutMismatch)
    assert error.message == f"the prefill host would send the KV as {offered}, this ticket allows {allowed}"
    receiver.require_serving()


def test_bytes_count_as_held_until_the_owner_releases_them(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    assert receiver.held_bytes == CACHE.layout.nbytes(10)
    kv.release()
    kv.release()
    assert receiver.held_bytes == 0
    assert not any(kv.keys)


@pytest.mark.parametrize("reuse", [True, False])
def test_memory_is_reused_if_its_owner_released_it_for_reuse(receiver: Receiver, reuse: bool) -> None:
    arenas = []
    for name in ("first", "second"):
        slot = receiver.issue(CACHE, name)
        receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
        kv = receiver.result(slot)
        assert isinstance(kv, ReceivedKV) and CACHE.matches(kv)
        arenas.append(kv.arena)
        kv.release(reuse=reuse)
        kv.release(reuse=reuse)
    assert (arenas[0] is arenas[1]) == reuse
    assert len(receiver.tickets.arenas._idle) == int(reuse)


def first(parts: Parts, **fields: Any) -> Parts:
    frame, payload = parts[0]
    return [(frame._replace(**fields), payload), *parts[1:]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda parts: [parts[0], *parts], "out of order"),
        (lambda parts: [*parts, parts[-1]], "was already received"),
        (lambda parts: list(reversed(parts)), "out of order"),
        (lambda parts: parts[1:], "out of order"),
        (lambda parts: parts[:-1], "truncated"),
        (lambda parts: [], "truncated"),
        (lambda parts: first(parts, end=11), "does not lie within"),
        (lambda parts: first(parts, length=1 << 63), "announces"),
        (lambda parts: first(parts, length=1), "announces"),
        (lambda parts: first(parts, layer=60_000), "not part of the model"),
        (lambda parts: first(parts, kind=9), "unknown frame kind"),
    ],
)
def test_a_broken_sequence_of_frames_is_refused_and_nothing_is_held(
    receiver: Receiver, damage: Callable[[Parts], Parts], message: str
) -> None:
    slot = receiver.issue(CACHE)
    accepted, refused = receiver.exchange(stream(header_for(slot), damage(parts_of(CACHE))), slot.ticket)
    assert accepted["ok"] and not refused["ok"]
    assert refused["error"]["code"] == "ProtocolError"
    error = receiver.result(slot)
    assert isinstance(error, ProtocolError)
    assert message in error.message
    receiver.require_serving()


def test_a_flipped_bit_in_a_payload_is_an_integrity_error(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    raw = bytearray(stream(header_for(slot), parts_of(CACHE)))
    raw[-frames.FRAME.size - frames.TOTALS.size - 5] ^= 4
    _, refused = receiver.exchange(bytes(raw), slot.ticket)
    assert refused["error"]["code"] == "IntegrityError"
    assert isinstance(receiver.result(slot), IntegrityError)
    receiver.require_serving()


def test_totals_that_do_not_match_are_refused(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    raw = stream(header_for(slot), parts_of(CACHE))[: -frames.TOTALS.size] + frames.TOTALS.pack(1, 2, bytes(16))
    receiver.exchange(raw, slot.ticket)
    error = receiver.result(slot)
    assert isinstance(error, ProtocolError) and "counts 1 frames and 2 bytes" in error.message
    receiver.require_serving()


@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
def test_a_sender_that_hangs_up_in_mid_transfer_is_lost(receiver: Receiver, share: float) -> None:
    slot = receiver.issue(CACHE)
    raw = stream(header_for(slot), parts_of(CACHE))
    header = len(opened(header_for(slot)))
    receiver.exchange(raw[: header + int(share * (len(raw) - header))], slot.ticket, hang_up=True)
    assert isinstance(receiver.result(slot), PeerLost)
    receiver.require_serving()


OTHER_LAYOUT = Layout((replace(mixed_layout().layers[0], key_dim=16), *mixed_layout().layers[1:]), "bfloat16")


@pytest.mark.parametrize(
    ("changes", "kind", "names"),
    [
        ({"layout": OTHER_LAYOUT}, LayoutMismatch, "layers[0].key_dim: decode has 8, prefill has 16"),
        ({"layout": mixed_layout("float32")}, LayoutMismatch, "dtype"),
        ({"fingerprint": structs.replace(FINGERPRINT, tokenizer="t2")}, FingerprintMismatch, "tokenizer"),
        ({"token_hash": "0" * 64}, FingerprintMismatch, "token_hash"),
        ({"tokens": 11}, FingerprintMismatch, "token_hash"),
        ({"start": 1}, ProtocolError, "from token 1"),
    ],
)
def test_a_transfer_of_something_else_is_refused_to_both_sides(
    receiver: Receiver, changes: dict[str, Any], kind: type[DisaggError], names: str
) -> None:
    slot = receiver.issue(CACHE)
    (refused,) = receiver.exchange(opened(header_for(slot, **changes)), slot.ticket)
    assert refused["error"]["code"] == kind.code()
    error = receiver.result(slot)
    assert isinstance(error, kind)
    assert names in error.message
    receiver.require_serving()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not a KV transfer"),
        (b"x" * (1 << 18), "not a KV transfer"),
        (OPENING.pack(MAGIC, 3) + b"{}", "version 3, the receiver version 4"),
        (PREAMBLE.pack(MAGIC, 99, bytes(32), bytes(16)) + b"{}", "version 99"),
    ],
)
def test_what_is_not_a_transfer_gets_an_error_reply(receiver: Receiver, raw: bytes, message: str) -> None:
    (refused,) = receiver.exchange(raw)
    assert refused["error"]["code"] == "ProtocolError"
    assert message in refused["error"]["message"]
    receiver.require_serving()


@pytest.mark.parametrize(("raw", "message"), [(b"{}", "tokens in the transfer header"), (b"\xff\xff\xff", "not JSON")])
def test_a_ticket_is_used_up_by_a_header_that_is_none(receiver: Receiver, raw: bytes, message: str) -> None:
    slot = receiver.issue(CACHE)
    (refused,) = receiver.exchange(opened(raw), slot.ticket)
    assert refused["error"]["code"] == "ProtocolError"
    error = receiver.result(slot)
    assert isinstance(error, ProtocolError) and message in error.message
    receiver.require_serving()


def test_unknown_used_revoked_and_expired_tickets_are_refused_alike(receiver: Receiver) -> None:
    used, revoked, expired = (receiver.issue(CACHE, lasts_s=s) for s in (PATIENCE_S, PATIENCE_S, 0.0))
    receiver.exchange(stream(header_for(used), parts_of(CACHE)), used.ticket)
    receiver.tickets.revoke(revoked.ticket)
    unknown = replace(used, ticket="nobody-issued-this")
    for slot in (unknown, used, revoked, expired):
        (refused,) = receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
        assert refused["error"]["code"] == TicketRefused.code()
    assert isinstance(receiver.result(revoked), Cancelled)
    assert isinstance(receiver.result(expired), PeerLost)
    kv = receiver.result(used)
    assert isinstance(kv, ReceivedKV)
    kv.release()
    receiver.require_serving()


def test_a_sender_that_knows_no_more_than_the_name_of_a_ticket_is_refused_and_the_ticket_stays_good(
    receiver: Receiver,
) -> None:
    slot = receiver.issue(CACHE)
    raw = opened(header_for(slot))
    with receiver.dial() as sock:
        sock.sendall(encode_preamble(slot.ticket, bytes(NONCE_BYTES)))
        identity = read_reply(sock)
        sock.sendall(bytes.fromhex(identity["proof"]) + raw[PROOF_BYTES:])  # the receiver's own proof, sent back
        (refused,) = read_replies(sock)
    assert refused["error"]["code"] == "TicketRefused" and slot.state == "issued"
    receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    kv.release()


def test_the_owner_gets_an_error_if_no_sender_came_by_the_deadline(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE, lasts_s=0.05)
    error = receiver.result(slot)
    assert isinstance(error, PeerLost) and "request r1 had not arrived by its deadline" in error.message


def test_revoking_while_bytes_arrive_ends_the_connection_with_the_reason(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slot = receiver.issue(CACHE)
    raw = stream(header_for(slot), parts_of(CACHE))
    with receiver.dial() as sock:
        introduce(sock, slot.ticket, raw[: len(raw) // 2])
        wait_until(lambda: receiver.held_bytes > 0)
        assert receiver.tickets.revoke(slot.ticket)
        assert isinstance(receiver.result(slot), Cancelled)
        accepted, refused = read_replies(sock)
    assert accepted["ok"]
    assert refused["error"]["code"] == "Cancelled"
    assert {record.levelname for record in caplog.records if "failed" in record.message} == {"INFO"}
    receiver.require_serving()


@pytest.mark.parametrize("said", [b"", b"DIS", OPENING.pack(MAGIC, KV_WHOLE) + b"half of a ticket"])
def test_a_silent_peer_is_dropped_and_blocks_nobody(said: bytes) -> None:
    receiver = start_receiver(QUICK)
    with receiver.dial() as silent:
        silent.sendall(said)
        wait_until(lambda: receiver.server.connections == 1)
        cache = Cache.random(mixed_layout(), 3)
        slot = receiver.issue(cache)
        receiver.exchange(stream(header_for(slot), parts_of(cache)), slot.ticket)
        kv = receiver.result(slot)
        assert isinstance(kv, ReceivedKV)
        kv.release()
        (dropped,) = read_replies(silent)
        assert dropped["error"]["code"] == "PeerLost"
    receiver.require_serving()
    receiver.server.close()


def test_a_ticket_without_a_header_fails_its_request_after_the_headers_time() -> None:
    receiver = start_receiver(QUICK)
    slot = receiver.issue(CACHE)
    with receiver.dial() as silent:
        introduce(silent, slot.ticket, encode_proof(bytes(PROOF_BYTES), 1000) + b"{")
        assert isinstance(receiver.result(slot), PeerLost)
    receiver.require_serving()
    receiver.server.close()


def test_a_header_that_drips_in_is_bounded_in_total() -> None:
    receiver = start_receiver(QUICK)
    slot = receiver.issue(CACHE)
    raw = opened(header_for(slot))
    began = time.monotonic()
    with receiver.dial() as sock:
        introduce(sock, slot.ticket, raw[: PROOF.size])
        try:
            for byte in raw[PROOF.size :]:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)  # the drip itself, not a wait for something
                if time.monotonic() - began > PATIENCE_S:
                    pytest.fail("the receiver listened on")
        except OSError:
            pass
    receiver.require_serving()
    receiver.server.close()


def test_a_peer_that_stalls_in_mid_payload_is_dropped_after_the_idle_time() -> None:
    receiver = start_receiver(QUICK)
    slot = receiver.issue(CACHE)
    raw = stream(header_for(slot), parts_of(CACHE))
    with receiver.dial() as sock:
        introduce(sock, slot.ticket, raw[:-100])
        error = receiver.result(slot)
        assert isinstance(error, PeerLost) and "no progress for 0.3 s" in error.message
        assert read_replies(sock)[-1]["error"]["code"] == "PeerLost"
    receiver.require_serving()
    receiver.server.close()


def test_transfers_over_the_bound_are_rejected_at_once_and_keep_their_ticket() -> None:
    receiver = start_receiver(ReceiveLimits(connections=2, linger_s=0.3))
    slots = [receiver.issue(CACHE, f"r{i}") for i in range(3)]
    held = [receiver.dial() for _ in range(2)]
    for sock, slot in zip(held, slots, strict=False):
        introduce(sock, slot.ticket, opened(header_for(slot)))
    wait_until(lambda: [slot.state for slot in slots[:2]] == ["claimed", "claimed"])
    (refused,) = receiver.exchange(opened(header_for(slots[2])), slots[2].ticket)
    assert refused["error"]["code"] == "Overloaded"
    assert slots[2].state == "issued"
    for sock in held:
        sock.close()
    receiver.tickets.revoke_all()
    receiver.require_serving()
    receiver.server.close()


@pytest.mark.parametrize("limits", [ReceiveLimits(newcomers=8), ReceiveLimits(newcomers_per_address=8)])
def test_however_many_connections_are_silent_a_transfer_finds_a_place_at_once(limits: ReceiveLimits) -> None:
    receiver = start_receiver(replace(limits, linger_s=0.3, preamble_s=60.0))
    silent = [receiver.dial() for _ in range(64)]
    wait_until(lambda: receiver.server.connections == 8)
    (evicted,) = read_replies(silent[0])
    assert evicted["error"]["code"] == "Overloaded"
    slot = receiver.issue(CACHE)
    assert [reply["ok"] for reply in receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)] == [
        True,
        True,
    ]
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    kv.release()
    for sock in silent:
        sock.close()
    receiver.require_serving()
    receiver.server.close()


def test_refused_connections_are_log_lines_of_one_kind_so_that_their_number_is_limited(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    for start in (b"GET", b"PUT"):
        receiver.exchange(start + b" / HTTP/1.1\r\n\r\n")
    assert [record.message for record in caplog.records] == [
        f"refused a KV connection from 127.0.0.1: not a KV transfer: it begins with b'{start} / ' (point the sender at "
        "the KV port)"
        for start in ("GET", "PUT")
    ]
    assert len({record.msg for record in caplog.records}) == 1


def test_when_descriptors_run_out_accepting_backs_off_and_recovers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[float] = []
    accept = socket.socket.accept

    def no_descriptors(sock: socket.socket) -> tuple[socket.socket, Any]:
        calls.append(time.monotonic())
        if len(calls) <= 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    with receiver.dial() as silent:
        wait_until(lambda: receiver.server.connections == 1)
        monkeypatch.setattr(socket.socket, "accept", no_descriptors)
        slot = receiver.issue(CACHE)
        receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
        assert read_replies(silent)[0]["error"]["code"] == "Overloaded"  # its descriptor was freed
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    kv.release()
    pauses = [after - before for before, after in itertools.pairwise(calls[:5])]
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.4), strict=True))
    assert {r.message for r in caplog.records if "accept" in r.message} == {
        "cannot accept a KV connection: [Errno 24] Too many open files"
    }


def test_idle_frames_keep_a_transfer_alive_whose_prompt_waits_for_its_turn() -> None:
    receiver = start_receiver(QUICK)
    slot = receiver.issue(CACHE)
    limits = SendLimits(idle_s=0.0)
    header = header_for(slot)
    with Transfer.open("127.0.0.1", receiver.server.port, header, deadline=slot.deadline, limits=limits) as transfer:
        first, *rest = CACHE.blocks()
        time.sleep(0.7)  # over twice the stall time
        transfer.send(first)
        time.sleep(0.7)
        for block in rest:
            transfer.send(block)
        transfer.finish()
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and CACHE.matches(kv)
    kv.release()
    receiver.server.close()


def test_a_sender_may_idle_for_long_before_its_first_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = itertools.count()
    monkeypatch.setattr("disagg.kv.receive.part.time", SimpleNamespace(monotonic=lambda: next(steps) * 100.0))
    receiver = start_receiver()
    slot = receiver.issue(CACHE)
    header = header_for(slot)
    start = opened(header)
    raw = start + 3 * frames.encode_idle(0) + stream(header, parts_of(CACHE)).removeprefix(start)
    receiver.exchange(raw, slot.ticket)
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and CACHE.matches(kv)
    kv.release()
    receiver.server.close()


def test_failed_transfers_leave_no_memory_behind() -> None:
    layout = Layout(tuple(LayerLayout("full", 4, 64, 64) for _ in range(4)), "float32")
    cache = Cache.random(layout, 1024)
    receiver = start_receiver()
    kept: list[Any] = []
    tracemalloc.start()
    for damaged in range(3):
        slot = receiver.issue(cache)
        raw = bytearray(stream(header_for(slot), parts_of(cache, 256)))
        raw[-100 - damaged] ^= 1
        receiver.exchange(bytes(raw), slot.ticket)
        kept.append(receiver.result(slot))  # an owner that logs the error later keeps no buffer alive
        del raw
    wait_until(receiver.settled)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(isinstance(error, IntegrityError) for error in kept)
    assert held < layout.nbytes(1024) / 2
    receiver.server.close()


def test_closing_ends_transfers_tickets_and_threads_and_frees_the_port() -> None:
    receiver = start_receiver()
    waiting, arriving = receiver.issue(CACHE, "waiting"), receiver.issue(CACHE, "arriving")
    with receiver.dial() as sock:
        introduce(sock, arriving.ticket, stream(header_for(arriving), parts_of(CACHE))[:-50])
        wait_until(lambda: receiver.held_bytes > 0)
        with ends_by_itself():
            receiver.server.close()
    assert isinstance(receiver.result(waiting), Cancelled)
    assert isinstance(receiver.result(arriving), Cancelled)
    assert receiver.settled()
    with pytest.raises(ConnectionRefusedError):
        receiver.dial()
    KVServer("127.0.0.1", receiver.server.port, Tickets()).close()


def test_a_taken_port_is_named_with_the_way_to_find_its_holder(receiver: Receiver) -> None:
    with pytest.raises(PortInUse) as caught:
        KVServer("127.0.0.1", receiver.server.port, Tickets())
    assert f"port {receiver.server.port} is already in use" in caught.value.message
    assert "lsof" in caught.value.hint


def test_an_address_that_is_not_this_hosts_is_a_clear_error() -> None:
    with pytest.raises(FleetError, match=r"cannot receive KV on 192\.0\.2\.1"):
        KVServer("192.0.2.1", 0, Tickets())


def test_a_defect_in_the_receiver_reaches_the_owner_and_frees_the_bytes(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*_: object) -> None:
        raise ZeroDivisionError

    broken: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    slot = receiver.issue(CACHE)
    with monkeypatch.context() as patch:
        patch.setattr("disagg.kv.receive.part.Assembly.place", defective)
        receiver.exchange(stream(header_for(slot), parts_of(CACHE)), slot.ticket)
    error = receiver.result(slot)
    assert isinstance(error, DisaggError) and "internal error of the KV receiver in request r1" in error.message
    wait_until(lambda: [type(b.exc_value) for b in broken] == [ZeroDivisionError])
    broken.clear()
    receiver.require_serving()


def test_a_peer_that_never_reads_its_reply_is_left_after_the_linger_time() -> None:
    receiver = start_receiver(QUICK)
    with socket.create_connection((receiver.server.host, receiver.server.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(receiver.settled, 30)
    receiver.server.close()


def test_the_reply_to_a_hostile_header_stays_small(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    body = json.loads(frames.encode_header(header_for(slot)))
    body["fingerprint"]["tokenizer"] = "\u0001" * 40_000
    raw = json.dumps(body).encode()
    (refused,) = receiver.exchange(opened(raw), slot.ticket)
    assert len(refused["error"]["message"]) <= MAX_ERROR_CHARS
    receiver.require_serving()


def test_a_connection_whose_ticket_cannot_be_looked_up_is_closed(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[MemoryError] = []

    def no_memory(*_: object) -> IssuedTicket:
        failed.append(MemoryError("of a test"))  # keeps what the failure's frames hold, the socket for one
        raise failed[0]

    slot = receiver.issue(CACHE)
    with monkeypatch.context() as patch:
        patch.setattr(receiver.tickets, "claim", no_memory)
        assert receiver.exchange(opened(header_for(slot)), slot.ticket) == []
    assert len(failed) == 1
    receiver.tickets.revoke(slot.ticket)
    receiver.require_serving()


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_host_out_of_threads_rejects_a_peer_and_goes_on(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise kind("can't start new thread")

    slot = receiver.issue(CACHE)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        (refused,) = receiver.exchange(opened(header_for(slot)), slot.ticket)
    assert refused["error"]["code"] == "HandoffError"
    receiver.tickets.revoke(slot.ticket)
    receiver.require_serving()


def test_kinds_beyond_keys_and_values_of_a_state_layer_are_refused(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    extra = (frames.Frame(Kind.KEYS, 2, 0, 0, 1, 4), b"1234")
    receiver.exchange(stream(header_for(slot), [extra, *parts_of(CACHE)]), slot.ticket)
    assert isinstance(receiver.result(slot), ProtocolError)
    receiver.require_serving()
