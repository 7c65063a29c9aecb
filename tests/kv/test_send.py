import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.errors import (
    Cancelled,
    DisaggError,
    HandoffError,
    LayoutMismatch,
    Overloaded,
    PeerLost,
    ProtocolError,
    TicketRefused,
)
from disagg.kv import frames
from disagg.kv import transfer as transfer_module
from disagg.kv.blocks import KVBlock
from disagg.kv.preamble import NONCE_BYTES, PREAMBLE, Nonces, decode_preamble, proof, ticket_digest
from disagg.kv.receive.tickets import IssuedTicket
from disagg.kv.received import ReceivedKV
from disagg.kv.sent import ComputeStep, LinkWait, Span, TransferResult
from disagg.kv.transfer import SendLimits, Transfer
from tests.deadlines import ends_by_itself, wait_until
from tests.kv.kv_parts import FINGERPRINT, PATIENCE_S, Cache, Receiver, header_for, mixed_layout
from tests.kv.peers import peer

CACHE = Cache.random(mixed_layout(), 10)
WIDE = Layout((LayerLayout("full", 1, 1 << 18, 0),), "float32")  # 1 MiB a token: fills every socket buffer
QUICK = SendLimits(connect_s=1, answer_s=0.3, stall_s=0.3)


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def open_to(receiver: Receiver, slot: IssuedTicket, limits: SendLimits | None = None) -> Transfer:
    return Transfer.open("127.0.0.1", receiver.server.port, header_for(slot), deadline=soon(), limits=limits)


def any_header(layout: Layout, tokens: int) -> frames.Header:
    return frames.Header("ticket", "r1", FINGERPRINT, layout, "00" * 32, tokens)


def accept(sock: socket.socket) -> None:
    sock.sendall(frames.encode_ok())


def wide_block(token: int) -> KVBlock:
    return KVBlock(0, token, token + 1, [memoryview(bytes(1 << 20))], [])


def send_until_it_fails(transfer: Transfer, tokens: int = 64) -> DisaggError:
    try:
        for token in range(tokens):
            transfer.send(wide_block(token))
        transfer.finish()
    except DisaggError as error:
        return error
    raise AssertionError("the transfer succeeded")


def test_a_finished_transfer_reports_bytes_and_times_that_add_up(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        for block in CACHE.blocks():
            transfer.send(block)
        result = transfer.finish()
        assert transfer.finish() is result
    assert result.payload_bytes == CACHE.layout.nbytes(10)
    assert result.spans[0].began <= result.spans[-1].ended <= result.acknowledged
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and CACHE.matches(kv)
    kv.release()


FRAMES = (Span(1.0, 2.0, 100), Span(4.0, 6.0, 200), Span(7.0, 9.0, 300))


@pytest.mark.parametrize(
    ("steps", "waits", "hidden", "waited", "exposed"),
    [
        pytest.param([(0.0, 5.0)], [], 2.0, 0.0, 5.0, id="hidden is what was sent in a step, exposed what followed"),
        pytest.param([(0.0, 0.5)], [], 0.0, 0.0, 9.5, id="nothing was sent in a step"),
        pytest.param([(0.0, 20.0)], [], 5.0, 0.0, 0.0, id="all of it was"),
        pytest.param([(0.0, 5.0, 0.25)], [], 0.5, 0.0, 5.0, id="of a shared step the prompt's share is hidden"),
        pytest.param([(0.0, 1.5), (1.5, 5.0)], [], 2.0, 0.0, 5.0, id="one frame in two steps"),
        pytest.param([(0.0, 1.5), (4.5, 8.0)], [], 3.0, 0.0, 2.0, id="between its steps others are computed"),
        pytest.param([(0.0, 1.5), (6.0, 8.0)], [(1.5, 300)], 1.5, 4.5, 6.5, id="it waits for two frames"),
        pytest.param([(0.0, 1.5), (6.0, 8.0)], [(1.5, 99)], 1.5, 0.5, 2.5, id="then others are computed"),
        pytest.param([(0.0, 1.5), (2.0, 8.0)], [(1.5, 9999)], 3.5, 0.5, 2.5, id="a wait ends with the next step"),
        pytest.param([(0, 1.5), (2, 3), (6, 8)], [(1.5, 1), (3, 200)], 1.5, 3.5, 5.5, id="it waits twice"),
        pytest.param([], [], 0.0, 0.0, 10.0, id="all rows were held"),
    ],
)
def test_sending_is_hidden_by_the_prompts_own_steps_and_exposed_while_it_waits(
    steps: list[tuple[float, ...]], waits: list[tuple[float, int]], hidden: float, waited: float, exposed: float
) -> None:
    result = TransferResult(10.0, FRAMES)
    ended = steps[-1][1] if steps else 0.0
    sent = result.sent(ended, [ComputeStep(*step) for step in steps], [LinkWait(*wait) for wait in waits])
    assert (sent.hidden_s, sent.waited_s, sent.exposed_s) == (hidden, waited, exposed)


MB = 1_000_000


def sent(seconds: float, *sizes: int, backlog: int = 0) -> TransferResult:
    """Frames of these sizes one after the other, each in one second; acknowledged `seconds` after the first began."""
    spans = tuple(Span(float(i), i + 1.0, size) for i, size in enumerate(sizes))
    return TransferResult(seconds, spans, backlog)


def test_the_links_rate_is_that_of_the_stretch_in_which_the_sender_never_waited() -> None:
    assert sent(4.0, 50 * MB, 50 * MB, 100 * MB).link_bytes_s == 50 * MB
    assert sent(4.0, 50 * MB, 50 * MB, 100 * MB, backlog=2).link_bytes_s == 50 * MB  # 100 MB in 2 s
    assert sent(4.0, 7 * MB, 50 * MB, 100 * MB, backlog=1).link_bytes_s == 50 * MB


@pytest.mark.parametrize(
    "result", [sent(1.0), sent(3.0, MB, MB), sent(3.0, 500 * MB, MB, backlog=1), sent(2.0, 500 * MB, backlog=1)]
)
def test_a_transfer_that_kept_up_has_no_link_rate(result: TransferResult) -> None:
    assert result.link_bytes_s is None


def test_a_transfer_shows_what_its_link_carries_at_least() -> None:
    """In the time of computing and sending: not while the receiver lets nothing be sent."""
    whole = TransferResult(10.0, (Span(0.0, 1.0, 60 * MB), Span(6.0, 8.0, 60 * MB)))
    steps = [ComputeStep(0.0, 2.0), ComputeStep(7.0, 9.0, 0.5)]
    assert whole.sent(9.0, steps).carried_bytes_s == 20 * MB  # 0 to 2 s, and 6 to 10 s
    assert sent(4.0, MB, MB).sent(2.0, ()).carried_bytes_s is None


def test_a_sender_that_waits_for_kv_begins_its_stretch_anew(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        for block in CACHE.blocks():
            gone = len(transfer._spans)
            transfer.send(block)
            wait_until(partial(lambda before: len(transfer._spans) > before, gone))
        result = transfer.finish()
    assert result.backlog > 0
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    kv.release()


def test_a_block_is_waited_for_on_the_sender_thread_before_it_is_read(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    ready = threading.Event()
    waited_on: list[str] = []
    source = bytearray(3 * 10 * 16)

    def wait() -> None:
        assert ready.wait(PATIENCE_S)
        waited_on.append(threading.current_thread().name)
        source[:] = CACHE.keys[0][0].tobytes()

    first, *rest = CACHE.blocks(chunk=10)
    assert isinstance(first, KVBlock)
    heads = [memoryview(source)[160 * h : 160 * (h + 1)] for h in range(3)]
    with open_to(receiver, slot) as transfer:
        transfer.send(KVBlock(0, 0, 10, heads, first.values, wait))
        ready.set()
        for block in rest:
            transfer.send(block)
        transfer.finish()
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV) and CACHE.matches(kv)
    assert waited_on == ["kv-send-r1"]
    kv.release()


def test_an_engine_that_fails_in_wait_fails_the_transfer_on_both_ends(receiver: Receiver) -> None:
    def wait() -> None:
        raise RuntimeError("CUDA error")

    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        block = next(CACHE.blocks())
        assert isinstance(block, KVBlock)
        transfer.send(KVBlock(block.layer, block.start, block.end, block.keys, block.values, wait))
        with pytest.raises(HandoffError, match="CUDA error"):
            transfer.finish()
    assert isinstance(receiver.result(slot), PeerLost)
    receiver.require_serving()


def test_a_refusal_is_raised_by_open_as_what_it_is(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    header = header_for(slot, layout=mixed_layout("float32"))
    with pytest.raises(LayoutMismatch, match="dtype: decode has bfloat16, prefill has float32"):
        Transfer.open("127.0.0.1", receiver.server.port, header, deadline=soon())
    with pytest.raises(TicketRefused):
        open_to(receiver, slot)
    receiver.require_serving()


def test_a_revoked_transfer_fails_at_the_next_send_with_the_receivers_reason(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        first, *rest = CACHE.blocks()
        transfer.send(first)
        receiver.tickets.revoke(slot.ticket)

        def refused() -> bool:
            try:
                transfer.send(rest[0])
            except Cancelled:
                return True
            return False

        wait_until(refused)
        with pytest.raises(Cancelled):
            transfer.finish()
    receiver.require_serving()


def test_a_sender_with_nothing_to_send_notices_that_the_receiver_gave_up(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        receiver.tickets.revoke(slot.ticket)
        wait_until(lambda: not transfer._thread.is_alive())
        with pytest.raises(Cancelled):
            transfer.send(next(CACHE.blocks()))
    receiver.require_serving()


def test_a_revocation_reaches_a_sender_that_is_busy_sending(receiver: Receiver) -> None:
    cache = Cache.random(WIDE, 48)
    slot = receiver.issue(cache)
    with open_to(receiver, slot) as transfer:
        receiver.tickets.revoke(slot.ticket)
        assert isinstance(send_until_it_fails(transfer), Cancelled)
    receiver.require_serving()


def test_a_block_that_does_not_fit_fails_where_it_was_made(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer, pytest.raises(ProtocolError, match="the layout has"):
        transfer.send(KVBlock(0, 0, 1, [memoryview(b"short")], []))
    assert isinstance(receiver.result(slot), PeerLost)


def test_blocks_out_of_order_are_refused_by_the_receiver(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer, pytest.raises(ProtocolError, match="out of order"):
        for block in reversed(list(CACHE.blocks())):
            transfer.send(block)
        transfer.finish()
    receiver.require_serving()


def test_leaving_without_finish_aborts_and_the_receiver_frees_everything(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        transfer.send(next(CACHE.blocks()))
    assert isinstance(receiver.result(slot), PeerLost)
    with pytest.raises(Cancelled):
        transfer.finish()
    with pytest.raises(Cancelled):
        transfer.send(next(CACHE.blocks()))
    receiver.require_serving()


def send_masses(transfer: Transfer, blocks: int, mass: memoryview) -> None:
    """Queue blocks of 64 MiB."""
    for start in range(0, 64 * blocks, 64):
        transfer.send(KVBlock(0, start, start + 64, [mass], []))


def test_send_never_waits_for_a_receiver_that_takes_nothing_and_fails_once_it_stalls() -> None:
    mass = memoryview(bytes(64 << 20))  # more than all socket buffers: the first block never leaves
    limits = SendLimits(stall_s=1.0)
    with peer(accept) as port:
        transfer = Transfer.open("127.0.0.1", port, any_header(WIDE, 64 * 21), deadline=soon(), limits=limits)
        began = time.monotonic()
        send_masses(transfer, 20, mass)
        assert transfer.failed is None and time.monotonic() - began < limits.stall_s
        assert transfer.queued_bytes >= 19 * (64 << 20)
        wait_until(lambda: transfer.failed is not None)
        assert isinstance(transfer.failed, PeerLost) and "no progress for 1 s" in transfer.failed.message
        with pytest.raises(PeerLost, match="no progress"):
            transfer.send(KVBlock(0, 0, 64, [mass], []))
        assert transfer.queued_bytes == 0
        transfer.abort()


def test_abort_ends_a_transfer_whose_receiver_takes_nothing() -> None:
    mass = memoryview(bytes(64 << 20))
    with peer(accept) as port:
        limits = SendLimits(stall_s=60)
        transfer = Transfer.open("127.0.0.1", port, any_header(WIDE, 192), deadline=soon(60), limits=limits)
        send_masses(transfer, 3, mass)
        with ends_by_itself():
            transfer.abort()
        assert isinstance(transfer.failed, Cancelled) and transfer.queued_bytes == 0


def test_more_queued_bytes_than_the_hard_bound_fail_the_transfer() -> None:
    mass = memoryview(bytes(64 << 20))
    limits = SendLimits(max_queued_bytes=3 * mass.nbytes)
    with (
        peer(accept) as port,
        Transfer.open("127.0.0.1", port, any_header(WIDE, 256), deadline=soon(), limits=limits) as transfer,
    ):
        send_masses(transfer, 3, mass)
        assert transfer.queued_bytes == 3 * mass.nbytes
        with pytest.raises(PeerLost, match="201326592 bytes of KV wait to be sent, at most 201326592 may"):
            transfer.send(wide_block(192))
        assert isinstance(transfer.failed, PeerLost)


def test_bytes_count_as_queued_until_they_are_sent(receiver: Receiver) -> None:
    slot = receiver.issue(CACHE)
    with open_to(receiver, slot) as transfer:
        for block in CACHE.blocks():
            transfer.send(block)
        wait_until(lambda: transfer.queued_bytes == 0)
        transfer.finish()
    kv = receiver.result(slot)
    assert isinstance(kv, ReceivedKV)
    kv.release()


def test_a_host_that_cannot_be_reached_fails_the_transfer_without_holding_up_send() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as others:
        for _ in range(4):  # the backlog is full, so that a further connection is never established
            sock = others.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        limits = SendLimits(connect_s=0.5)
        began = time.monotonic()
        port = full.getsockname()[1]
        transfer = Transfer("127.0.0.1", port, any_header(WIDE, 64), deadline=soon(), limits=limits)
        transfer.send(wide_block(0))
        assert time.monotonic() - began < 0.5 and transfer.failed is None
        with pytest.raises(PeerLost, match="cannot connect"):
            transfer.finish()


def test_a_transfer_aborted_while_it_connects_uses_up_no_ticket(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = receiver.issue(CACHE)
    aborted = threading.Event()
    connect = socket.create_connection

    def slow_connect(*args: Any, **kwargs: Any) -> socket.socket:
        assert aborted.wait(PATIENCE_S)
        return connect(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", slow_connect)
        transfer = Transfer("127.0.0.1", receiver.server.port, header_for(slot), deadline=soon())
        transfer.abort()
        aborted.set()
        wait_until(lambda: not transfer._thread.is_alive())
    assert slot.state == "issued"
    receiver.tickets.revoke(slot.ticket)
    receiver.require_serving()


def test_a_closed_port_is_a_peer_lost_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerLost, match=f"cannot connect to decode host 127.0.0.1:{port}"):
        Transfer.open("127.0.0.1", port, any_header(WIDE, 1), deadline=soon())


def test_a_deadline_in_the_past_is_not_even_tried() -> None:
    with pytest.raises(PeerLost, match="deadline passed before connecting"):
        Transfer.open("127.0.0.1", 1, any_header(WIDE, 1), deadline=soon(-1))


def without_proof(preamble: bytes) -> bytes:
    return frames.encode_ok()


def with_another_ticket(preamble: bytes) -> bytes:
    nonces = Nonces(decode_preamble(preamble).nonce, bytes(NONCE_BYTES))
    return frames.encode_identity(nonces.receiver, proof("another ticket", "receiver", nonces))


def with_the_senders_own_words(preamble: bytes) -> bytes:
    opening = decode_preamble(preamble)
    return frames.encode_identity(opening.nonce, opening.ticket_digest)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (without_proof, ProtocolError),
        (with_another_ticket, TicketRefused),
        (with_the_senders_own_words, TicketRefused),
    ],
)
def test_a_program_that_has_taken_the_receivers_port_is_sent_neither_ticket_nor_header_nor_kv(
    answer: Callable[[bytes], bytes], kind: type[DisaggError]
) -> None:
    recorded = bytearray()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.settimeout(PATIENCE_S)
        with sock:
            recorded.extend(sock.recv(PREAMBLE.size, socket.MSG_WAITALL))
            sock.sendall(answer(bytes(recorded)))
            while piece := sock.recv(1 << 16):
                recorded.extend(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(kind):
            Transfer.open("127.0.0.1", listener.getsockname()[1], any_header(WIDE, 1), deadline=soon())
        thread.join(PATIENCE_S)
    assert len(recorded) == PREAMBLE.size and decode_preamble(bytes(recorded)).ticket_digest == ticket_digest("ticket")


def test_a_receiver_that_never_answers_the_header_is_lost() -> None:
    with peer(lambda _: None) as port, pytest.raises(PeerLost, match=r"no progress for 0\.3 s"):
        Transfer.open("127.0.0.1", port, any_header(WIDE, 1), deadline=soon(), limits=QUICK)


def test_a_receiver_that_stops_reading_is_lost_after_the_idle_time() -> None:
    with peer(accept) as port:
        transfer = Transfer.open("127.0.0.1", port, any_header(WIDE, 64), deadline=soon(), limits=QUICK)
        with ends_by_itself(), transfer:
            assert isinstance(send_until_it_fails(transfer), PeerLost)


def test_a_receiver_that_never_acknowledges_is_lost() -> None:
    with (
        peer(accept) as port,
        Transfer.open("127.0.0.1", port, any_header(WIDE, 0), deadline=soon(), limits=QUICK) as transfer,
        pytest.raises(PeerLost, match="no progress"),
    ):
        transfer.finish()


def test_the_deadline_ends_a_transfer_whose_compute_never_ends() -> None:
    with peer(accept) as port:
        transfer = Transfer.open("127.0.0.1", port, any_header(WIDE, 1), deadline=soon(0.3))
        wait_until(lambda: not transfer._thread.is_alive())
        with pytest.raises(PeerLost, match="before all blocks were computed"):
            transfer.send(wide_block(0))


def refuse_and_reset(sock: socket.socket) -> None:
    accept(sock)
    sock.sendall(frames.encode_error(Overloaded("out of memory", "wait")))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # a reset


def test_the_reason_is_read_even_when_the_connection_is_reset_behind_it() -> None:
    with (
        peer(refuse_and_reset) as port,
        Transfer.open("127.0.0.1", port, any_header(WIDE, 64), deadline=soon()) as transfer,
    ):
        error = send_until_it_fails(transfer)
    assert isinstance(error, Overloaded)
    assert error.message == "out of memory"


def accept_and_reset(sock: socket.socket) -> None:
    accept(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_reset_without_a_reason_is_a_lost_peer() -> None:
    with (
        peer(accept_and_reset) as port,
        Transfer.open("127.0.0.1", port, any_header(WIDE, 64), deadline=soon()) as transfer,
    ):
        assert isinstance(send_until_it_fails(transfer), PeerLost)


@pytest.mark.parametrize(
    "babble",
    [
        b"\xff\xff\xff\xff",
        frames.REPLY_LENGTH.pack(3) + b"abc",
        frames.REPLY_LENGTH.pack(2) + b"{}",
        frames.encode_ok(),
    ],
)
def test_nonsense_from_the_receiver_is_a_protocol_error(babble: bytes) -> None:
    def behave(sock: socket.socket) -> None:
        accept(sock)
        sock.sendall(babble)

    with (
        peer(behave) as port,
        Transfer.open("127.0.0.1", port, any_header(WIDE, 64), deadline=soon(), limits=QUICK) as transfer,
    ):
        assert isinstance(send_until_it_fails(transfer), ProtocolError)


def test_a_connection_that_is_reset_before_its_options_are_set_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(sock: socket.socket, seconds: float) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(transfer_module, "give_up_unacknowledged", reset)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(PeerLost, match="closed the connection"):
            Transfer.open("127.0.0.1", listener.getsockname()[1], any_header(WIDE, 64), deadline=soon())
        with listener.accept()[0] as accepted:
            accepted.settimeout(PATIENCE_S)
            assert accepted.recv(1) == b""
