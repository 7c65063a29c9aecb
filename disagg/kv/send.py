"""The sending end of a transfer: the compute thread queues blocks, a sender thread sends them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from disagg.errors import Cancelled, DisaggError, HandoffError, PeerLost, ProtocolError
from disagg.kv import frames
from disagg.kv.blocks import Block
from disagg.kv.channel import Channel, OnPiece

SEND_BUFFER_BYTES = 4 << 20
POLL_S = 0.2  # interval between checks for a reply or the deadline while there is nothing to send
STOP_S = 5.0  # how long abort() waits for the sender thread
WAITED_S = 1e-4  # shorter pauses do not count: the socket's buffers keep the link busy for longer
BEHIND_SHARE = 0.8  # of the bytes: more than a link that keeps up with the computation ever sends without a pause
RATED_BYTES = 64 << 20  # for a rate: many times both ends' socket buffers, whose bytes are sent but not delivered


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Bounds on waiting, in seconds. answer_s: for the receiver's reply to the header. idle_s: without any progress,
    including a wait for room in the queue. queue_blocks: the most blocks that may be queued."""

    connect_s: float = 5.0
    answer_s: float = 10.0
    idle_s: float = 30.0
    queue_blocks: int = 64


@dataclass(frozen=True, slots=True)
class Span:
    """The sending of one frame: time.monotonic() before and after, and its payload bytes."""

    began: float
    ended: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferResult:
    """An acknowledged transfer. Times are time.monotonic() on the sending host.

    backlog: the spans from this index on were sent without waiting for KV between them.
    """

    acknowledged: float
    spans: tuple[Span, ...]
    backlog: int = 0

    @property
    def payload_bytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def fell_behind(self) -> bool:
        """Whether nearly all of it was sent without waiting for KV: the computation was ahead, and may have been
        slowed by the link."""
        return sum(span.nbytes for span in self.spans[self.backlog :]) > BEHIND_SHARE * self.payload_bytes

    @property
    def link_bytes_s(self) -> float | None:
        """Bytes per second of the link and the receiver, from the start of the last stretch without a wait for KV to
        the acknowledgement. None if that stretch is shorter than RATED_BYTES, as it is if the transfer kept up with
        the computation."""
        stretch = self.spans[self.backlog :]
        nbytes = sum(span.nbytes for span in stretch)
        return nbytes / (self.acknowledged - stretch[0].began) if nbytes >= RATED_BYTES else None

    def hidden_s(self, compute_ended: float) -> float:
        """Seconds spent sending before the compute ended: the part of the transfer that delays nothing."""
        return sum(max(0.0, min(span.ended, compute_ended) - span.began) for span in self.spans)

    def exposed_s(self, compute_ended: float) -> float:
        """Seconds from the end of compute to the acknowledgement: the part of the transfer that the user waits for."""
        return max(0.0, self.acknowledged - compute_ended)


class Transfer:
    """The transfer of one KV cache to a decode host. Call `open`, then `send` for each block, then `finish`.

    A failure, including one that the receiver reports, is raised by the next `send` and by `finish`. Leaving the `with`
    block without `finish` aborts. Blocks must stay unchanged until `finish` or `abort` has returned.
    """

    def __init__(self, channel: Channel, header: frames.Header, limits: SendLimits) -> None:
        self._channel = channel
        self._layout, self._wire = header.layout, header.wire
        self._limits = limits
        self._queue: queue.Queue[_FramedBlock | None] = queue.Queue(limits.queue_blocks)
        self._failing = threading.Lock()
        self._failure: DisaggError | None = None
        self._result: TransferResult | None = None
        self._digest = frames.new_digest()
        self._spans: list[Span] = []
        self._backlog = 0
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{header.request_id}", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, host: str, port: int, header: frames.Header, *, deadline: float, limits: SendLimits | None = None
    ) -> Self:
        """Connect, send the header and wait for the reply. Raises PeerLost or the error that the receiver replies.

        deadline: on time.monotonic(), for the whole transfer.
        """
        limits = limits or SendLimits()
        channel = _connect(host, port, deadline, limits)
        try:
            _send_header(channel, header)
        except DisaggError:
            channel.close()
            raise
        channel.idle_s = limits.idle_s
        return cls(channel, header, limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def send(self, block: Block) -> None:
        """Queue a block. Blocks only while the queue is full; PeerLost if that lasts `idle_s`."""
        self._put(_FramedBlock(block.wait, frames.frames_of(block, self._layout, self._wire)))

    def finish(self) -> TransferResult:
        """Send what is queued and the end frame; returns once the receiver has acknowledged all of it."""
        if self._result is None:
            self._put(None)
            self._thread.join(max(0.0, self._channel.deadline - time.monotonic()) + STOP_S)
        self._raise_failure()
        if self._result is None:
            self.abort()
            raise PeerLost("the KV transfer did not end by its deadline")
        return self._result

    def abort(self) -> None:
        """Close the connection and drop queued blocks. No effect after `finish`."""
        if self._result is None:
            self._fail(Cancelled("the KV transfer was aborted by its sender"))
        self._channel.abort()
        self._thread.join(STOP_S)

    def _put(self, block: _FramedBlock | None) -> None:
        self._raise_failure()
        timeout = min(self._limits.idle_s, max(0.0, self._channel.deadline - time.monotonic()))
        try:
            self._queue.put(block, timeout=timeout)
        except queue.Full:
            self._fail(
                PeerLost(f"{self._channel.peer} accepted no KV for {timeout:.3g} s", "check it and the link to it")
            )
            self._raise_failure()

    def _run(self) -> None:
        try:
            while (block := self._next()) is not None:
                self._send_block(block)
            self._result = self._conclude()
        except DisaggError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - Block.wait is the engine's code and may raise anything
            self._fail(HandoffError(f"the KV could not be read for sending: {error!r}"))
        finally:
            self._channel.close()
            self._drain()

    def _next(self) -> _FramedBlock | None:
        """The next block to send, None for the end. While there is none, raises if the receiver reports a failure."""
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        began = time.monotonic()
        while True:
            try:
                block = self._queue.get(timeout=POLL_S)
                if block is not None or time.monotonic() - began > WAITED_S:
                    self._backlog = len(self._spans)
                return block
            except queue.Empty:
                if self._channel.readable():
                    raise self._reason() from None
                if time.monotonic() >= self._channel.deadline:
                    raise PeerLost("the KV transfer's deadline passed before all blocks were computed") from None

    def _send_block(self, block: _FramedBlock) -> None:
        if block.wait is not None:
            began = time.monotonic()
            block.wait()
            if time.monotonic() - began > WAITED_S:
                self._backlog = len(self._spans)
        for frame, views in block.frames:
            began = time.monotonic()
            self._write([memoryview(frames.encode_frame(frame)), *views], self._digest.update)
            self._spans.append(Span(began, time.monotonic(), frame.length))

    def _conclude(self) -> TransferResult:
        totals = frames.Totals(len(self._spans), sum(s.nbytes for s in self._spans), self._digest.digest())
        self._write([memoryview(frames.encode_end(totals))])
        _read_reply(self._channel)
        return TransferResult(time.monotonic(), tuple(self._spans), self._backlog)

    def _write(self, views: list[memoryview], on_piece: OnPiece | None = None) -> None:
        try:
            written = self._channel.write(views, on_piece, stop_on_reply=True)
        except PeerLost as lost:
            raise self._reason(lost) from lost
        if not written:
            raise self._reason()

    def _reason(self, lost: PeerLost | None = None) -> DisaggError:
        """Why the transfer ended early: the error that the receiver replied if there is one, else `lost`."""
        try:
            if self._channel.readable():
                _read_reply(self._channel)
        except PeerLost as no_reply:
            return lost or no_reply
        except DisaggError as refusal:
            return refusal
        return lost or ProtocolError(f"{self._channel.peer} acknowledged KV that it had not received")

    def _fail(self, error: DisaggError) -> None:
        with self._failing:  # the first failure is the cause, later ones its consequences
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _drain(self) -> None:
        """Drop queued blocks, which also unblocks a thread that waits for room in the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()


@dataclass(frozen=True, slots=True)
class _FramedBlock:
    """A queued block: its `wait`, and its frames with their payloads."""

    wait: Callable[[], None] | None
    frames: list[tuple[frames.Frame, list[memoryview]]]


def _connect(host: str, port: int, deadline: float, limits: SendLimits) -> Channel:
    peer = f"decode host {host}:{port}"
    timeout = min(limits.connect_s, deadline - time.monotonic())
    if timeout <= 0:
        raise PeerLost(f"the KV transfer's deadline passed before connecting to {peer}")
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        raise PeerLost(
            f"cannot connect to {peer}: {error}", "check that it runs and that its KV port is open"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # optional: some kernels refuse a size over their maximum instead of capping it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return Channel(sock, peer, deadline=deadline, idle_s=limits.answer_s)


def _send_header(channel: Channel, header: frames.Header) -> None:
    """Send the header and read the reply; a refusal may arrive before all of the header is sent."""
    try:
        channel.write([memoryview(frames.encode_header(header))], stop_on_reply=True)
    except PeerLost:
        if not channel.readable():
            raise
    _read_reply(channel)


def _read_reply(channel: Channel) -> dict[str, Any]:
    length = frames.decode_reply_length(channel.read(frames.REPLY_LENGTH.size))
    return frames.decode_reply(channel.read(length))
