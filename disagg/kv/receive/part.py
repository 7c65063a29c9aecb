"""One connection whose ticket is valid: the KV of one part, from its header to its acknowledgement.

While hidden states come, the receiver replies how many chunks it has checked, and how many may be sent: they have
memory that the engine frees by computing from them, so that a sender ahead of the engine has to wait.
"""

from __future__ import annotations

import logging
import threading
import time

from disagg.api.names import KV_WHOLE
from disagg.errors import Cancelled, DisaggError, HandoffError, PeerLost, TicketRefused
from disagg.kv import frames
from disagg.kv.channel import Channel
from disagg.kv.frames import Kind, carries_hidden, encode_credit
from disagg.kv.receive.assembly import Assembly
from disagg.kv.receive.chunks import ChunkedAssembly
from disagg.kv.receive.incoming import Incoming
from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.tickets import IssuedTicket, Tickets
from disagg.kv.received import ReceiveTiming

REPLY_S = 1.0  # how long sending the last reply may take
REPEAT_S = 1.0  # a sender that waits for credit hears so often that this end still runs

log = logging.getLogger(__name__)


def receive_part(
    channel: Channel,
    issued: IssuedTicket,
    header_bytes: int,
    tickets: Tickets,
    limits: ReceiveLimits,
    *,
    version: int = KV_WHOLE,
) -> None:
    """Serve a connection that has claimed its ticket to its end, in this version of the protocol. The outcome goes to
    the ticket's callback and, as a reply, to the peer."""
    try:
        failure = _attempt(channel, issued, header_bytes, tickets, limits, version=version)
        tickets.unclaim(issued, channel.abort)
        if isinstance(failure, TicketRefused):  # one connection too many: the others are as good as before
            _refuse(channel, failure, limits)
        elif failure is not None:
            tickets.settle(issued, failure)
            revoked_here = isinstance(issued.failure, Cancelled)
            level = logging.INFO if revoked_here else logging.WARNING
            log.log(level, "KV transfer of request %s failed: %s", issued.expected.request_id, issued.failure)
            _refuse(channel, issued.failure or failure, limits)
    except BaseException:  # a defect in this program must not leave the request waiting
        tickets.settle(
            issued, HandoffError(f"internal error of the KV receiver in request {issued.expected.request_id}")
        )
        raise


def _attempt(
    channel: Channel, issued: IssuedTicket, header_bytes: int, tickets: Tickets, limits: ReceiveLimits, *, version: int
) -> DisaggError | None:
    """Receive, deliver and acknowledge. Returns None, or the failure after this connection has left the buffers."""
    joined = False
    credits = Credits(channel, issued.incoming)
    try:
        header = frames.decode_header(channel.read(header_bytes), issued.ticket, version)
        issued.expected.require(header)
        issued.incoming.join(header, credits.send)
        joined = True
        timing, received = _receive(channel, issued, header, credits, limits)
        kv = issued.incoming.complete(timing)
        if kv is not None and not tickets.settle(issued, kv):  # whoever has ended the ticket lets go of the KV
            raise Cancelled("the request ended before its KV was complete")
    except DisaggError as error:
        return DisaggError.from_json(error.to_json())  # a copy: the traceback's frames reference the buffers
    finally:
        credits.close()
        if joined:
            issued.incoming.leave()
    acknowledgement = frames.encode_ok(received_bytes=received, receive_s=timing.last_byte - timing.first_byte)
    send_reply(channel, acknowledgement)
    channel.close_gently(limits.linger_s)
    return None


def _receive(
    channel: Channel, issued: IssuedTicket, header: frames.Header, credits: Credits, limits: ReceiveLimits
) -> tuple[ReceiveTiming, int]:
    """Accept the part and read all of it, each payload straight into its place. Returns its times and its bytes."""
    claimed = time.monotonic()
    incoming = issued.incoming
    channel.deadline, channel.idle_s = issued.deadline, limits.stall_s
    if carries_hidden(header):
        credits.open()
    else:
        channel.write([memoryview(frames.encode_ok())])
    # After the reply, so that the prefill host computes its first chunk while fresh memory is allocated.
    kv = incoming.kv()
    assembly = ChunkedAssembly(kv, header, incoming.chunks()) if header.chunks else Assembly(kv, header.part)
    expected = kv.nbytes + header.hidden_bytes * (header.tokens - header.start)
    arrived = issued.pace.join(expected, time.monotonic(), credits.used_up)
    digest = frames.Digest()

    def on_piece(view: memoryview) -> None:
        digest.update(view)
        arrived.piece(view)

    def next_head() -> bytes:
        """The head of the next frame that is not idle."""
        while (frame := frames.decode_frame(head := channel.read(frames.FRAME.size))).kind is Kind.IDLE:
            arrived.idle(frame.end)
            credits.repeat()
        return head

    head = next_head()
    first_byte = time.monotonic()
    whole = 0  # bytes of chunks that are complete
    try:
        while (frame := frames.decode_frame(head)).kind is not Kind.END:
            if frame.kind is Kind.CHUNK:
                sent = channel.read(frames.DIGEST_BYTES)
                assembly.end_chunk(frame, digest.chunk(head), sent)
                whole = arrived.nbytes
                credits.send()
            else:
                views = assembly.place(frame)
                digest.update(head)
                channel.read_into(views, on_piece)
            head = next_head()
    except PeerLost:
        if isinstance(assembly, ChunkedAssembly):
            _log_lost(issued, header, assembly.coming, arrived.nbytes - whole)
        raise
    totals = frames.decode_totals(channel.read(frames.TOTALS.size))
    last_byte = time.monotonic()
    assembly.finish(totals, digest.end())
    return ReceiveTiming(claimed, first_byte, last_byte, time.monotonic()), assembly.nbytes


def _log_lost(issued: IssuedTicket, header: frames.Header, chunk: range, nbytes: int) -> None:
    """Log what had come of a chunk whose sender is lost: another host computes it again."""
    whole = header.layout.nbytes(chunk.stop, chunk.start, header.wire) + header.hidden_bytes * len(chunk)
    text = "KV transfer of request %s: the sender is lost in the chunk of tokens [%d, %d), with %d of its %d bytes"
    if chunk:
        log.info(text, issued.expected.request_id, chunk.start, chunk.stop, nbytes, whole)


def _refuse(channel: Channel, error: DisaggError, limits: ReceiveLimits) -> None:
    send_reply(channel, frames.encode_error(error))
    channel.close_gently(limits.linger_s)


def send_reply(channel: Channel, raw: bytes) -> None:
    """Send the last reply. A failure is only logged: the outcome has been delivered on this host."""
    channel.deadline = max(channel.deadline, time.monotonic() + REPLY_S)
    try:
        channel.write([memoryview(raw)])
    except PeerLost as error:
        log.info("could not reply: %s", error)


class Credits:
    """The credit of one connection, sent by the threads of the connection and of the engine. Nothing is sent before
    `open` and after `close`."""

    def __init__(self, channel: Channel, incoming: Incoming) -> None:
        self._channel, self._incoming = channel, incoming
        self._lock = threading.Lock()
        self._is_open = False
        self._sent = 0.0

    def open(self) -> None:
        """The header is accepted: its reply is the first credit."""
        self._is_open = True
        self.send()

    def send(self) -> None:
        """State what has come and what may. Does not wait."""
        with self._lock:
            if self._is_open:
                self._sent = time.monotonic()
                self._channel.reply(encode_credit(self._incoming.arriving.progress))

    def repeat(self) -> None:
        """State it again if that was some time ago: the sender waits."""
        if time.monotonic() >= self._sent + REPEAT_S:
            self.send()

    def used_up(self) -> bool:
        """Whether the sender may send no more until the engine has computed."""
        progress = self._incoming.arriving.progress
        return self._is_open and progress.checked == progress.allowed

    def close(self) -> None:
        """What follows is the last reply."""
        with self._lock:
            self._is_open = False
