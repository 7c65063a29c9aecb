"""What a sender of hidden states hears of the receiver while it sends."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from disagg.api.names import KV_CHUNKS
from disagg.errors import Cancelled
from disagg.kv import frames
from disagg.kv.arriving import CREDIT_CHUNKS
from disagg.kv.channel import Channel
from disagg.kv.receive import part as module
from disagg.kv.transfer import SendLimits, Transfer
from tests.deadlines import wait_until
from tests.kv.chunk_parts import Awaited, Prompt, frames_for, stream_of
from tests.kv.kv_parts import PATIENCE_S, Receiver, introduce, read_replies, read_reply

PROMPT = Prompt.random(40)


def test_a_sender_that_waits_hears_again_and_again_that_the_receiver_runs(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.05)
    awaited = Awaited.by(receiver.tickets, PROMPT)
    limits = SendLimits(stall_s=0.4, idle_s=0.02)
    deadline = time.monotonic() + PATIENCE_S
    header = PROMPT.header(awaited.slot)
    with Transfer("127.0.0.1", receiver.server.port, header, deadline=deadline, limits=limits) as transfer:
        for block in PROMPT.blocks(4):
            transfer.send(block)
        wait_until(lambda: awaited.arriving.whole == 4 * CREDIT_CHUNKS)
        time.sleep(0.8)  # twice as long as it waits for a receiver that says nothing
        assert transfer.failed is None and transfer.starved
        awaited.arriving.watch(awaited.take_all)
        transfer.finish()
    awaited.arriving.release()


def test_credit_leaves_at_once(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    with receiver.dial() as sock:
        introduce(sock, awaited.slot.ticket, stream_of(PROMPT.header(awaited.slot), []), KV_CHUNKS)
        wait_until(lambda: receiver.server._connections)
        (channel,) = receiver.server._connections
        assert channel._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    awaited.arriving.release()


def test_credit_follows_the_engine_and_ends_before_the_last_reply(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    raw = stream_of(PROMPT.header(awaited.slot), frames_for(PROMPT, 4)[: CREDIT_CHUNKS * 6])
    with receiver.dial() as sock:
        introduce(sock, awaited.slot.ticket, raw[: -frames.FRAME.size - frames.TOTALS.size], KV_CHUNKS)
        said = [frames.decode_credit(read_reply(sock)) for _ in range(CREDIT_CHUNKS + 1)]
        assert said == [(n, CREDIT_CHUNKS) for n in range(CREDIT_CHUNKS + 1)]
        chunk = awaited.arriving.take()
        assert chunk is not None
        awaited.arriving.taken(chunk)
        assert frames.decode_credit(read_reply(sock)) == (CREDIT_CHUNKS, CREDIT_CHUNKS + 1)
        receiver.tickets.revoke(awaited.slot.ticket)
        assert read_reply(sock)["error"]["code"] == "Cancelled"
        chunk = awaited.arriving.take()
        assert chunk is not None
        awaited.arriving.taken(chunk)
        with contextlib.suppress(ConnectionError):
            assert read_reply(sock) is None, "credit came after the last reply"
    assert isinstance(awaited.outcome(), Cancelled)
    awaited.arriving.release()


def test_nothing_is_said_before_the_header_is_accepted_nor_after_the_last_reply(receiver: Receiver) -> None:
    awaited = Awaited.by(receiver.tickets, PROMPT)
    mine, theirs = socket.socketpair()
    channel = Channel(mine, "the sender", deadline=time.monotonic() + PATIENCE_S, idle_s=PATIENCE_S)
    credits = module.Credits(channel, awaited.slot.incoming)
    credits.send()
    credits.open()
    credits.send()
    credits.close()
    credits.send()
    channel.close()
    with theirs:
        assert [frames.decode_credit(reply) for reply in read_replies(theirs)] == [(0, CREDIT_CHUNKS)] * 2
    awaited.arriving.release()
