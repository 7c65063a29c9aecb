"""The sending end: one transfer, fed with blocks by the compute thread and shipped by a thread of its own."""

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
LISTEN_S = 0.2  # how often a sender with nothing to send looks whether either side has given up
STOP_S = 5.0  # how long abort() waits for the sender thread
WAITED_S = 1e-4  # a shorter pause did not leave the link without work: its buffers hold more than that
BEHIND_SHARE = 0.8  # of the bytes: more than a link that keeps up with the computation ever sends in one stretch
RATED_BYTES = 64 << 20  # many times what both ends' socket buffers hold, which a rate would else count as delivered


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Bounds on waiting, in seconds. answer_s: for the receiver's answer to the header. idle_s: without any progress,
    also for room in the queue. queue_blocks: blocks that may wait to be sent."""

    connect_s: float = 5.0
    answer_s: float = 10.0
    idle_s: float = 30.0
    queue_blocks: int = 64


@dataclass(frozen=True, slots=True)
class Span:
    """One frame on its way: time.monotonic() around its sending, and its payload bytes."""

    began: float
    ended: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferResult:
    """An acknowledged transfer. Times are time.monotonic() on the sending host.

    backlog: the spans from this index on were sent without waiting for KV in between.
    """

    acknowledged: float
    spans: tuple[Span, ...]
    backlog: int = 0

    @property
    def payload_bytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def fell_behind(self) -> bool:
        """Whether nearly all of it was sent without ever waiting for KV: the computation was ahead throughout, and may
        itself have waited for the link."""
        return sum(span.nbytes for span in self.spans[self.backlog :]) > BEHIND_SHARE * self.payload_bytes

    @property
    def link_bytes_s(self) -> float | None:
        """What the link and the receiver took, in bytes per second, while there always was KV to send: over the last
        such stretch, to its acknowledgement. None where that stretch is too short to tell, as it is where the
        transfer kept up with the computation."""
        stretch = self.spans[self.backlog :]
        nbytes = sum(span.nbytes for span in stretch)
        return nbytes / (self.acknowledged - stretch[0].began) if nbytes >= RATED_BYTES else None

    def hidden_s(self, compute_ended: float) -> float:
        """Seconds spent sending before the compute ended: the part of the transfer that cost the user nothing."""
        return sum(max(0.0, min(span.ended, compute_ended) - span.began) for span in self.spans)

    def exposed_s(self, compute_ended: float) -> float:
        """Seconds from the end of compute to the acknowledgement: what the user waited for."""
        return max(0.0, self.acknowledged - compute_ended)


class Transfer:
    """One KV cache on its way to a decode host. Use `open`; then `send` each block, then `finish`.

    A failure, also one that the receiver reports, is raised by the next `send` and by `finish`. Leaving the `with`
    block without `finish` aborts. Blocks must stay unchanged until `finish` or `abort` has returned.
    """

    def __init__(self, channel: Channel, header: frames.Header, limits: SendLimits) -> None:
        self._channel = channel
        self._layout, self._wire = header.layout, header.wire
        self._limits = limits
        self._queue: queue.Queue[_Parcel | None] = queue.Queue(limits.queue_blocks)
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
        """Connect, present the header and wait for the answer; raises PeerLost or the receiver's refusal.

        deadline: on time.monotonic(), for the whole transfer.
        """
        limits = limits or SendLimits()
        channel = _connect(host, port, deadline, limits)
        try:
            _converse_header(channel, header)
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
        """Queue a block. Waits only while the queue is full, PeerLost once that has lasted `idle_s`."""
        self._put(_Parcel(block.wait, frames.frames_of(block, self._layout, self._wire)))

    def finish(self) -> TransferResult:
        """Send what is queued and the end frame; returns when the receiver has acknowledged all of it."""
        if self._result is None:
            self._put(None)
            self._thread.join(max(0.0, self._channel.deadline - time.monotonic()) + STOP_S)
        self._raise_failure()
        if self._result is None:
            self.abort()
            raise PeerLost("the KV transfer did not end by its deadline")
        return self._result

    def abort(self) -> None:
        """Drop the connection and forget queued blocks. Without effect after `finish`."""
        if self._result is None:
            self._fail(Cancelled("the KV transfer was aborted by its sender"))
        self._channel.abort()
        self._thread.join(STOP_S)

    def _put(self, parcel: _Parcel | None) -> None:
        self._raise_failure()
        patience = min(self._limits.idle_s, max(0.0, self._channel.deadline - time.monotonic()))
        try:
            self._queue.put(parcel, timeout=patience)
        except queue.Full:
            self._fail(PeerLost(f"{self._channel.peer} took no KV for {patience:.3g} s", "check it and the link to it"))
            self._raise_failure()

    def _run(self) -> None:
        try:
            while (parcel := self._next()) is not None:
                self._ship(parcel)
            self._result = self._conclude()
        except DisaggError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - Block.wait is the engine's: its failure belongs to the caller
            self._fail(HandoffError(f"the KV could not be read for sending: {error!r}"))
        finally:
            self._channel.close()
            self._drain()

    def _next(self) -> _Parcel | None:
        """What to send next. With nothing to send, listens for a receiver that gives up."""
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        began = time.monotonic()
        while True:
            try:
                parcel = self._queue.get(timeout=LISTEN_S)
                if parcel is not None or time.monotonic() - began > WAITED_S:
                    self._backlog = len(self._spans)
                return parcel
            except queue.Empty:
                if self._channel.readable():
                    raise self._last_words() from None
                if time.monotonic() >= self._channel.deadline:
                    raise PeerLost("the KV transfer's deadline passed before all blocks were computed") from None

    def _ship(self, parcel: _Parcel) -> None:
        if parcel.wait is not None:
            asked = time.monotonic()
            parcel.wait()
            if time.monotonic() - asked > WAITED_S:
                self._backlog = len(self._spans)
        for frame, views in parcel.frames:
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
            raise self._last_words(lost) from lost
        if not written:
            raise self._last_words()

    def _last_words(self, lost: PeerLost | None = None) -> DisaggError:
        """Why the receiver gave up before the end, where it said so; else that it did."""
        try:
            if self._channel.readable():
                _read_reply(self._channel)
        except PeerLost as silence:
            return lost or silence
        except DisaggError as reason:
            return reason
        return lost or ProtocolError(f"{self._channel.peer} acknowledged KV that it had not received")

    def _fail(self, error: DisaggError) -> None:
        with self._failing:  # the first failure is the cause, later ones its consequences
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _drain(self) -> None:
        """Forget queued blocks, which also frees a thread that waits for room."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A block as the sender thread needs it."""

    wait: Callable[[], None] | None
    frames: list[tuple[frames.Frame, list[memoryview]]]


def _connect(host: str, port: int, deadline: float, limits: SendLimits) -> Channel:
    peer = f"decode host {host}:{port}"
    patience = min(limits.connect_s, deadline - time.monotonic())
    if patience <= 0:
        raise PeerLost(f"the KV transfer's deadline passed before connecting to {peer}")
    try:
        sock = socket.create_connection((host, port), timeout=patience)
    except OSError as error:
        raise PeerLost(
            f"cannot connect to {peer}: {error}", "check that it runs and that its KV port is open"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # a wish: some kernels refuse more than their maximum instead of giving that
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return Channel(sock, peer, deadline=deadline, idle_s=limits.answer_s)


def _converse_header(channel: Channel, header: frames.Header) -> None:
    try:
        channel.write([memoryview(frames.encode_header(header))], stop_on_reply=True)
    except PeerLost:
        if not channel.readable():
            raise
    _read_reply(channel)


def _read_reply(channel: Channel) -> dict[str, Any]:
    length = frames.decode_reply_length(channel.read(frames.REPLY_LENGTH.size))
    return frames.decode_reply(channel.read(length))
