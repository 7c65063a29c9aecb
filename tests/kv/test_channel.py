import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from disagg.errors import PeerLost
from disagg.kv.channel import IOV_MAX, PIECE_BYTES, Channel, give_up_unacknowledged
from tests.deadlines import ends_by_itself
from tests.kv.kv_parts import PATIENCE_S


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    mine, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    channel = Channel(mine, "the peer", deadline=time.monotonic() + PATIENCE_S, idle_s=PATIENCE_S)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads an option of Linux")
def test_a_sender_gives_up_what_nobody_acknowledges_after_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        sock.connect(listener.getsockname())
        give_up_unacknowledged(sock, 5.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


def test_more_views_than_one_call_takes_and_views_over_a_piece_arrive_in_order() -> None:
    a, b = socket.socketpair()
    deadline = time.monotonic() + PATIENCE_S
    sender = Channel(a, "receiver", deadline=deadline, idle_s=PATIENCE_S)
    receiver = Channel(b, "sender", deadline=deadline, idle_s=PATIENCE_S)
    views = [memoryview(bytes([i % 251]) * (i % 3)) for i in range(3 * IOV_MAX)]
    views.append(memoryview(bytes(range(256)) * (3 * PIECE_BYTES // 256)))
    sent, seen = bytearray(), bytearray()
    thread = threading.Thread(target=lambda: sender.write(views, sent.extend))
    thread.start()
    got = [memoryview(bytearray(len(view))) for view in views]
    receiver.read_into(got, seen.extend)
    thread.join(PATIENCE_S)
    assert b"".join(got) == b"".join(views) == sent == seen
    sender.close()
    receiver.close()


def test_silence_ends_after_the_idle_time(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    channel.idle_s = 0.05
    with pytest.raises(PeerLost, match=r"the peer made no progress for 0\.05 s"):
        channel.read(1)


def test_a_trickle_ends_at_the_deadline(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    channel.deadline = time.monotonic() + 0.2
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            peer.sendall(b".")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(PeerLost, match="deadline"):
            channel.read(1 << 20)
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def test_a_peer_that_stops_reading_ends_a_write(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    channel.idle_s = 0.05
    with pytest.raises(PeerLost, match="no progress"):
        channel.write([memoryview(bytes(1 << 24))])


def test_a_closed_peer_is_lost(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(b"half")
    peer.close()
    with pytest.raises(PeerLost, match="closed"):
        channel.read(8)


def test_a_write_that_stops_on_a_reply_returns_when_the_peer_sends_one(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(b"stop")
    assert channel.write([memoryview(bytes(1 << 24))], on_reply=lambda: False) is False
    assert channel.read(4) == b"stop"


@pytest.mark.parametrize("writing", [False, True])
def test_abort_from_another_thread_wakes_the_owner(pair: tuple[Channel, socket.socket], writing: bool) -> None:
    channel, peer = pair
    failures: list[PeerLost] = []

    def work() -> None:
        try:
            channel.write([memoryview(bytes(1 << 24))], on_reply=lambda: False) if writing else channel.read(1)
        except PeerLost as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    if writing:
        peer.recv(1)
    channel.abort()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if not writing:
        assert failures


def test_after_an_abort_a_last_reply_can_still_be_sent(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    channel.abort()
    assert channel.write([memoryview(b"bye")])
    assert peer.recv(3) == b"bye"


def test_an_aborted_read_fails_even_where_bytes_are_waiting(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(b"a flood")
    channel.abort()
    with pytest.raises(PeerLost, match="ended on this side"):
        channel.read(1)


def test_a_last_reply_after_an_abort_is_not_lost_to_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as peer:
        peer.settimeout(PATIENCE_S)
        channel = Channel(listener.accept()[0], "the peer", deadline=time.monotonic() + PATIENCE_S, idle_s=PATIENCE_S)
        peer.sendall(bytes(10_000))  # never read by the owner
        assert channel.read(1) == b"\0"
        channel.abort()
        channel.write([memoryview(b"bye")])
        channel.close_gently(1)
        assert peer.recv(3, socket.MSG_WAITALL) == b"bye"
        assert peer.recv(1) == b""  # an orderly end, no reset


def test_closing_gently_waits_for_the_peer_for_a_bounded_time(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    with ends_by_itself():
        channel.close_gently(0.1)
    assert peer.recv(1) == b""


def test_aborting_a_closed_channel_does_nothing(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    channel.close()
    channel.abort()


def test_a_peer_that_reads_no_reply_is_given_up_and_whoever_replies_does_not_wait(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, peer = pair
    with ends_by_itself(), pytest.raises(PeerLost, match="ended on this side"):
        while True:
            channel.reply(bytes(1 << 12))
            channel.read_into([memoryview(bytearray(1))] if channel._aborted else [])
    assert peer.recv(4) == bytes(4)


def test_a_reply_to_a_peer_that_has_gone_is_for_the_owner_to_find_out(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.close()
    for _ in range(3):
        channel.reply(b"x")
    channel.close()
    channel.reply(b"x")
