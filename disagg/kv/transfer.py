"""The sending end of a transfer: the compute thread queues blocks, a sender thread connects and sends them."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from disagg.errors import Cancelled, DisaggError, HandoffError, PeerLost, ProtocolError, TicketRefused
from disagg.kv import frames
from disagg.kv.arriving import CREDIT_CHUNKS
from disagg.kv.blocks import Block, ChunkEnd, StateBlock
from disagg.kv.channel import Channel, OnPiece, give_up_unacknowledged
from disagg.kv.frames import Credit, carries_hidden
from disagg.kv.outbox import FramedBlock, Outbox, frames_of
from disagg.kv.preamble import NONCE_BYTES, Nonces, encode_preamble, encode_proof, proof, proves
from disagg.kv.sent import Span, TransferResult

SEND_BUFFER_BYTES = 4 << 20
POLL_S = 0.1  # interval between checks for a reply or the deadline while there is nothing to send
STOP_S = 5.0  # how long abort() waits for the sender thread
CREDIT_POLL_S = 0.02  # the same with hidden states: the receiver has three more chunks to compute meanwhile
WAITED_S = 1e-4  # shorter pauses do not count: the socket's buffers keep the link busy for longer


@dataclass(frozen=True, slots=True)
class SendLimits:
    """How long the sending end waits for what, in seconds. The deadline bounds the whole. connect_s: until the
    connection stands. answer_s: until the receiver replies to the preamble, and to the header. stall_s: while bytes
    wait to be sent and the receiver takes none, or until it acknowledges the last one, or while the next chunk may not
    be sent and it says nothing. credit_s: while the next chunk may not be sent. idle_s: between two idle frames while
    there is nothing to send. max_queued_bytes: the most that may wait to be sent."""

    connect_s: float = 3.0
    answer_s: float = 5.0
    stall_s: float = 5.0
    credit_s: float = 120.0
    idle_s: float = 0.25
    max_queued_bytes: int = 16 << 30


class Transfer:
    """The transfer of one KV cache, or of one part of it, to a decode host. Call `send` for each block, then `finish`.

    No call but `finish`, `abort` and `open` waits for the receiver: a thread of the transfer's own connects and sends.
    A failure, including one that the receiver reports, is raised by the next `send` and by `finish`. Leaving the `with`
    block without `finish` aborts. Blocks must stay unchanged until `finish` or `abort` has returned.
    """

    def __init__(
        self,
        host: str,
        port: int,
        header: frames.Header,
        *,
        deadline: float,
        limits: SendLimits | None = None,
        beats: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin to connect. deadline: when the whole transfer must have ended, by time.monotonic(). beats: how many
        pieces of work the engine has finished, for any prompt: while there is no KV to send, a receiver waits if this
        changes."""
        self._peer = f"decode host {host}:{port}"
        self._address = (host, port)
        self._header = header
        self._raw_header = frames.encode_header(header)
        self._deadline = deadline
        self._limits = limits or SendLimits()
        self._beats = beats
        self._outbox = Outbox(self._limits.max_queued_bytes)
        self._channel: Channel | None = None  # from the moment in which the connection stands
        self._answered = threading.Event()  # the receiver has accepted the header, or the transfer has failed
        self._result: TransferResult | None = None
        self._digest = frames.Digest()
        self._put_chunks = 0  # chunks that were put, or begun to be
        self._credit = Credit(0, CREDIT_CHUNKS)  # as long as the receiver has not said how much it gives
        self._heard = self._given = 0.0  # when the receiver said something last, and gave credit
        self._spans: list[Span] = []
        self._backlog = 0  # the first span after the last wait for KV: from there on the link is the bottleneck
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{header.request_id}", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, host: str, port: int, header: frames.Header, *, deadline: float, limits: SendLimits | None = None
    ) -> Self:
        """Connect and wait until the receiver has accepted the header. Raises PeerLost or the error that it replies."""
        transfer = cls(host, port, header, deadline=deadline, limits=limits)
        bounds = transfer._limits
        if not transfer._answered.wait(bounds.connect_s + 2 * bounds.answer_s + STOP_S):
            transfer._outbox.fail(PeerLost(f"{transfer._peer} did not answer", "check the host and the link to it"))
        if transfer.failed is not None:
            transfer.abort()
            raise transfer.failed
        return transfer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait to be sent. Readable from any thread."""
        return self._outbox.queued_bytes

    @property
    def failed(self) -> DisaggError | None:
        """The error that ended the transfer, None while there is none. Readable from any thread."""
        return self._outbox.failure

    @property
    def starved(self) -> bool:
        """Whether what is computed next may not be sent yet: the receiver is behind. Readable from any thread."""
        return carries_hidden(self._header) and self._put_chunks >= self._credit.allowed

    def send(self, block: Block) -> None:
        """Queue a block; returns at once. In a transfer without chunks their ends are left out."""
        header = self._header
        if isinstance(block, ChunkEnd):
            if header.chunks:
                self._outbox.put(FramedBlock(None, frames_of(block, header.layout), self._put_chunks))
                self._put_chunks += 1
            return
        framed = frames_of(block, header.layout, header.wire, header.part, header.hidden_bytes)
        chunk = -1 if isinstance(block, StateBlock) else self._put_chunks
        self._outbox.put(FramedBlock(block.wait, framed, chunk))

    def finish(self) -> TransferResult:
        """Send what is queued and the end frame; returns once the receiver has acknowledged all of it."""
        if self._result is None:
            self._outbox.end()
            self._thread.join(max(0.0, self._deadline - time.monotonic()) + STOP_S)
        if self._result is not None:
            return self._result
        self._outbox.fail(PeerLost("the KV transfer did not end by its deadline"))
        self.abort()
        assert self.failed is not None
        raise self.failed

    def abort(self) -> None:
        """Close the connection and drop queued blocks. No effect after `finish`."""
        if self._result is None:
            self._outbox.fail(Cancelled("the KV transfer was aborted by its sender"))
        channel = self._channel
        if channel is not None:  # a thread that still connects reads no block, and ends by itself
            channel.abort()
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            channel = self._channel = _connect(self._address, self._peer, self._deadline, self._limits)
            try:
                if self.failed is not None:  # aborted while it connected; abort() may not have seen the channel
                    raise self.failed
                self._result = self._send_all(channel)
            finally:
                channel.close()
        except DisaggError as error:
            self._outbox.fail(error)
        except Exception as error:  # noqa: BLE001 - Block.wait is the engine's code and may raise anything
            self._outbox.fail(HandoffError(f"the KV could not be read for sending: {error!r}"))
        finally:
            self._answered.set()

    def _send_all(self, channel: Channel) -> TransferResult:
        reply = _send_header(channel, self._header, self._raw_header)
        if carries_hidden(self._header):
            self._take_credit(reply)
        channel.idle_s = self._limits.stall_s
        self._answered.set()
        while (block := self._next(channel)) is not None:
            self._send_block(channel, block)
        return self._conclude(channel)

    def _next(self, channel: Channel) -> FramedBlock | None:
        """The next block to send, None for the end. While there is none, or it may not be sent, sends idle frames, and
        raises if the receiver reports a failure."""
        with contextlib.suppress(TimeoutError):
            return self._outbox.take(0, self._allowed)
        poll_s = CREDIT_POLL_S if carries_hidden(self._header) else POLL_S
        began = sent = time.monotonic()
        while True:
            gated = self._outbox.queued_bytes > 0  # what is next may not be sent yet: the receiver is waited for
            try:
                block = self._outbox.take(0 if gated else poll_s, self._allowed)
                if block is not None or time.monotonic() - began > WAITED_S:
                    self._backlog = len(self._spans)
                return block
            except TimeoutError:
                if channel.readable(poll_s if gated else 0):
                    self._hear(channel)
                now = time.monotonic()
                if now >= channel.deadline:
                    raise PeerLost("the KV transfer's deadline passed before all blocks were computed") from None
                if gated:
                    self._require_credit(now, began)
                if now - sent >= self._limits.idle_s:
                    self._write(channel, [memoryview(frames.encode_idle(self._beats()))])
                    sent = now

    @property
    def _allowed(self) -> float:
        return self._credit.allowed if carries_hidden(self._header) else math.inf

    def _send_block(self, channel: Channel, block: FramedBlock) -> None:
        if block.wait is not None:
            began = time.monotonic()
            block.wait()
            if time.monotonic() - began > WAITED_S:
                self._backlog = len(self._spans)
        for frame, views in block.frames:
            head = frames.encode_frame(frame)
            if frame.kind is frames.Kind.CHUNK:
                self._write(channel, [memoryview(head + self._digest.chunk(head))])
                self._outbox.sent(frame.length)
                if carries_hidden(self._header):  # else what is computed next waits for credit that is here: 42 ms
                    self._hear(channel)
                continue
            began = time.monotonic()
            self._write(channel, [memoryview(head), *views], self._digest.update)
            self._spans.append(Span(began, time.monotonic(), frame.length))
            self._outbox.sent(frame.length)

    def _conclude(self, channel: Channel) -> TransferResult:
        totals = frames.TransferTotals(len(self._spans), sum(s.nbytes for s in self._spans), self._digest.end())
        self._write(channel, [memoryview(frames.encode_end(totals))])
        while frames.decode_credit(_read_reply(channel)) is not None and carries_hidden(self._header):
            pass  # credit that was sent before the acknowledgement
        return TransferResult(time.monotonic(), tuple(self._spans), self._backlog)

    def _write(self, channel: Channel, views: list[memoryview], on_piece: OnPiece | None = None) -> None:
        """Send all views. Raises why the transfer ended, if it did: the receiver's error if there is one."""

        def on_reply() -> bool:
            self._read(channel)
            return True

        try:
            channel.write(views, on_piece, on_reply=on_reply)
        except PeerLost as lost:
            raise self._reason(channel, lost) from lost

    def _hear(self, channel: Channel) -> None:
        """Take what the receiver has said."""
        while channel.readable():
            self._read(channel)

    def _read(self, channel: Channel) -> None:
        """What the receiver sends while frames are sent: credit, or the error that it raises."""
        self._take_credit(_read_reply(channel))

    def _reason(self, channel: Channel, lost: PeerLost) -> DisaggError:
        """Why the connection ended: the error that the receiver replied if there is one, else `lost`."""
        try:
            self._hear(channel)
        except PeerLost:
            pass
        except DisaggError as refusal:
            return refusal
        return lost

    def _take_credit(self, reply: dict[str, Any]) -> None:
        credit = frames.decode_credit(reply) if carries_hidden(self._header) else None
        if credit is None:
            raise ProtocolError(f"{self._peer} acknowledged KV that it had not received")
        now = time.monotonic()
        self._heard = now
        if credit.allowed > self._credit.allowed or not self._given:
            self._given = now
        self._credit = credit

    def _require_credit(self, now: float, began: float) -> None:
        """PeerLost if what waits to be sent has waited too long for its credit, since `began` at the earliest."""
        limits = self._limits
        if now - max(began, self._heard) > limits.stall_s:
            text = f"{self._peer} lets no chunk be sent, and has said nothing for {limits.stall_s:g} s"
            raise PeerLost(text, "check the host and the link to it")
        if now - max(began, self._given) > limits.credit_s:
            text = f"{self._peer} has computed no chunk for {limits.credit_s:g} s, and lets none be sent"
            raise PeerLost(text, "see its log: its engine may hang")


def _connect(address: tuple[str, int], peer: str, deadline: float, limits: SendLimits) -> Channel:
    timeout = min(limits.connect_s, deadline - time.monotonic())
    if timeout <= 0:
        raise PeerLost(f"the KV transfer's deadline passed before connecting to {peer}")
    try:
        sock = socket.create_connection(address, timeout=timeout)
    except OSError as error:
        raise PeerLost(
            f"cannot connect to {peer}: {error}", "check that it runs and that its KV port is open"
        ) from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        give_up_unacknowledged(sock, limits.stall_s)
    except OSError as error:  # macOS: the peer has reset the connection since
        sock.close()
        raise PeerLost(f"{peer} closed the connection: {error}", "see its log") from error
    with contextlib.suppress(OSError):  # optional: some kernels refuse a size over their maximum instead of capping it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return Channel(sock, peer, deadline=deadline, idle_s=limits.answer_s)


def _send_header(channel: Channel, header: frames.Header, raw: bytes) -> dict[str, Any]:
    """Send the header to a receiver that has proven that it has the ticket; its reply. Raises TicketRefused if it has
    not."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    preamble = encode_preamble(header.ticket, nonce, header.version)
    nonce_there, given = frames.decode_identity(_answer(channel, preamble))
    nonces = Nonces(nonce, nonce_there, header.version)
    if not proves(given, header.ticket, "receiver", nonces):
        raise TicketRefused(
            f"{channel.peer} does not have the KV ticket that it should have issued",
            "find the program on that port: it is not the decode host's server",
        )
    return _answer(channel, encode_proof(proof(header.ticket, "sender", nonces), len(raw)), raw)


def _answer(channel: Channel, *raw: bytes) -> dict[str, Any]:
    """The reply to these bytes; a refusal may arrive before all of them are sent."""
    try:
        channel.write([memoryview(piece) for piece in raw], on_reply=lambda: False)
    except PeerLost:
        if not channel.readable():
            raise
    return _read_reply(channel)


def _read_reply(channel: Channel) -> dict[str, Any]:
    length = frames.decode_reply_length(channel.read(frames.REPLY_LENGTH.size))
    return frames.decode_reply(channel.read(length))
