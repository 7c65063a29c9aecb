"""One connection whose ticket is valid: the KV of one part, from its header to its acknowledgement, each payload read
straight into its place."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from disagg.api.layout import plane_bytes
from disagg.errors import (
    Cancelled,
    DisaggError,
    HandoffError,
    IntegrityError,
    PeerLost,
    ProtocolError,
    TicketRefused,
)
from disagg.kv import frames
from disagg.kv.arena import Buffer
from disagg.kv.channel import Channel
from disagg.kv.frames import Frame, Kind, TransferTotals
from disagg.kv.parts import WHOLE, Part
from disagg.kv.receive.pace import Arrived, ReceiveLimits
from disagg.kv.receive.tickets import IssuedTicket, Tickets
from disagg.kv.received import ReceivedKV, ReceiveTiming

REPLY_S = 1.0  # how long sending the last reply may take

log = logging.getLogger(__name__)


def receive_part(
    channel: Channel, issued: IssuedTicket, header_bytes: int, tickets: Tickets, limits: ReceiveLimits
) -> None:
    """Serve a connection that has claimed its ticket to its end. The outcome goes to the ticket's callback and, as a
    reply, to the peer."""
    try:
        failure = _attempt(channel, issued, header_bytes, tickets, limits)
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
    channel: Channel, issued: IssuedTicket, header_bytes: int, tickets: Tickets, limits: ReceiveLimits
) -> DisaggError | None:
    """Receive, deliver and acknowledge. Returns None, or the failure after this connection has left the buffers."""
    joined = False
    try:
        header = frames.decode_header(channel.read(header_bytes), issued.ticket)
        issued.expected.require(header)
        issued.incoming.join(header)
        joined = True
        timing, received = _receive(channel, issued, header, limits)
        kv = issued.incoming.complete(timing)
        if kv is not None and not tickets.settle(issued, kv):
            kv.release()
            raise Cancelled("the request ended before its KV was complete")
    except DisaggError as error:
        return DisaggError.from_json(error.to_json())  # a copy: the traceback's frames reference the buffers
    finally:
        if joined:
            issued.incoming.leave()
    acknowledgement = frames.encode_ok(received_bytes=received, receive_s=timing.last_byte - timing.first_byte)
    send_reply(channel, acknowledgement)
    channel.close_gently(limits.linger_s)
    return None


def _receive(
    channel: Channel, issued: IssuedTicket, header: frames.Header, limits: ReceiveLimits
) -> tuple[ReceiveTiming, int]:
    """Accept the part and read all of it, each payload straight into its place. Returns its times and its bytes."""
    claimed = time.monotonic()
    channel.deadline, channel.idle_s = issued.deadline, limits.stall_s
    channel.write([memoryview(frames.encode_ok())])
    # After the reply, so that the prefill host computes its first chunk while fresh memory is allocated.
    kv = issued.incoming.kv()
    assembly = Assembly(kv, header.part)
    arrived = issued.pace.join(kv.nbytes, time.monotonic())
    digest = frames.new_digest()

    def on_piece(view: memoryview) -> None:
        digest.update(view)
        arrived.piece(view)

    head = _next_head(channel, arrived)
    first_byte = time.monotonic()
    while (frame := frames.decode_frame(head)).kind is not frames.Kind.END:
        views = assembly.place(frame)
        digest.update(head)
        channel.read_into(views, on_piece)
        head = _next_head(channel, arrived)
    totals = frames.decode_totals(channel.read(frames.TOTALS.size))
    last_byte = time.monotonic()
    assembly.finish(totals, digest.digest())
    return ReceiveTiming(claimed, first_byte, last_byte, time.monotonic()), assembly.nbytes


def _next_head(channel: Channel, arrived: Arrived) -> bytes:
    """The head of the next frame that is not idle."""
    while (frame := frames.decode_frame(head := channel.read(frames.FRAME.size))).kind is frames.Kind.IDLE:
        arrived.idle(frame.end)
    return head


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


class Assembly:
    """One part of the cache `kv`, filled frame by frame in the protocol's order. Each part has its own memory within
    the cache, so several threads may fill several parts at once.

    Within one layer, kind and plane, rows arrive in ascending order without gaps; beyond that frames may interleave.
    """

    def __init__(self, kv: ReceivedKV, part: Part = WHOLE) -> None:
        layout = kv.layout
        self._keys: list[list[_Plane]] = []  # [layer][plane]
        self._values: list[list[_Plane]] = []
        for index, (layer, keys, values) in enumerate(zip(layout.layers, kv.keys, kv.values, strict=True)):
            rows, heads = layer.rows(kv.tokens, kv.start), part.heads_of(layout, index)
            for layers, dim, buffers in ((self._keys, layer.key_dim, keys), (self._values, layer.value_dim, values)):
                sized = zip(plane_bytes(dim, layout.itemsize, kv.wire), buffers, strict=True)
                layers.append([_Plane(rows, heads, size, buffer) for size, buffer in sized])
        self._states = kv.states
        self._missing_states = {
            (i, j) for i, states in enumerate(self._states) if part.has_states(layout, i) for j in range(len(states))
        }
        self._frames = 0
        self._bytes = 0

    def place(self, frame: Frame) -> list[memoryview]:
        """The memory for the next frame's payload, in wire order. ProtocolError if that frame may not come next."""
        views = self._place_state(frame) if frame.kind is Kind.STATE else self._place_rows(frame)
        self._frames += 1
        self._bytes += frame.length
        return views

    @property
    def nbytes(self) -> int:
        """Payload bytes of the frames so far."""
        return self._bytes

    def finish(self, totals: TransferTotals, digest: bytes) -> None:
        """The end of the part. ProtocolError if something is missing, IntegrityError if the digests differ."""
        self._require_complete()
        if (totals.frames, totals.payload_bytes) != (self._frames, self._bytes):
            raise ProtocolError(
                f"the end frame counts {totals.frames} frames and {totals.payload_bytes} bytes, "
                f"{self._frames} and {self._bytes} arrived"
            )
        if totals.digest != digest:
            raise IntegrityError(
                f"the KV was damaged on the way: its digest is {digest.hex()}, the sender's {totals.digest.hex()}",
                "repeat the request; if it happens again, test the network link and the memory of both hosts",
            )

    def _place_rows(self, frame: Frame) -> list[memoryview]:
        planes = self._keys if frame.kind is Kind.KEYS else self._values
        if frame.layer >= len(planes) or frame.tensor >= len(planes[frame.layer]):
            raise ProtocolError(f"{_name(frame)} is not part of the model")
        return planes[frame.layer][frame.tensor].place(frame)

    def _place_state(self, frame: Frame) -> list[memoryview]:
        key = (frame.layer, frame.tensor)
        if key not in self._missing_states or frame.start or frame.end:
            raise ProtocolError(f"{_name(frame)} is not expected, or was already received")
        buffer = self._states[frame.layer][frame.tensor]
        _require_length(frame, buffer.nbytes)
        self._missing_states.remove(key)
        return [buffer.data]

    def _require_complete(self) -> None:
        for name, layers in (("keys", self._keys), ("values", self._values)):
            for layer, index, plane in (
                (i, j, plane) for i, planes in enumerate(layers) for j, plane in enumerate(planes)
            ):
                if not plane.complete:
                    part = f"plane {index} of the {name}" if index else f"the {name}"
                    raise ProtocolError(f"truncated: {part} of layer {layer} end at {plane.next} of {plane.rows.stop}")
        for layer, index in sorted(self._missing_states):
            raise ProtocolError(f"truncated: state {index} of layer {layer} is missing")


@dataclass(slots=True)
class _Plane:
    """Some heads of one plane of the keys or values of one layer. [all heads, rows, row_bytes], filled from the first
    row on. next: index of the first row that has not arrived."""

    rows: range
    heads: range
    row_bytes: int
    buffer: Buffer
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.rows.start

    @property
    def complete(self) -> bool:
        return self.next == self.rows.stop or not self.heads or self.row_bytes == 0

    def place(self, frame: Frame) -> list[memoryview]:
        """The memory of the frame's rows: one slice per head, or one slice if the frame carries every row."""
        if not self.heads:
            raise ProtocolError(f"{_name(frame)} is not in this connection's part")
        if self.complete:
            raise ProtocolError(f"{_name(frame)} comes after the last expected row")
        if frame.start != self.next:
            raise ProtocolError(f"{_name(frame)} is out of order: row {self.next} comes next")
        if not frame.start < frame.end <= self.rows.stop:
            raise ProtocolError(f"{_name(frame)} does not lie within rows [{self.rows.start}, {self.rows.stop})")
        size = (frame.end - frame.start) * self.row_bytes
        _require_length(frame, size * len(self.heads))
        self.next = frame.end
        whole = self.buffer.data
        stride = len(self.rows) * self.row_bytes
        if size == stride:
            return [whole[self.heads.start * stride : self.heads.stop * stride]]
        first = (frame.start - self.rows.start) * self.row_bytes
        return [whole[head * stride + first : head * stride + first + size] for head in self.heads]


def _require_length(frame: Frame, expected: int) -> None:
    if frame.length != expected:
        raise ProtocolError(f"{_name(frame)} announces {frame.length} payload bytes, the layout has {expected}")


def _name(frame: Frame) -> str:
    if frame.kind is Kind.STATE:
        return f"state {frame.tensor} of layer {frame.layer}"
    plane = f"plane {frame.tensor} of " if frame.tensor else ""
    return f"rows [{frame.start}, {frame.end}) of {plane}the {frame.kind.name.lower()} of layer {frame.layer}"
