"""The KV of one part in memory, filled frame by frame in the protocol's order, each payload straight into its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.api.layout import plane_bytes
from disagg.errors import IntegrityError, ProtocolError
from disagg.kv.arena import Buffer
from disagg.kv.frames import Frame, Kind, TransferTotals
from disagg.kv.parts import WHOLE, Part
from disagg.kv.received import ReceivedKV


class Assembly:
    """One part of the cache `kv`, filled frame by frame in the protocol's order. Each part has its own memory within
    the cache, so several threads may fill several parts at once.

    Within one layer, kind and plane, rows arrive in ascending order without gaps; beyond that frames may interleave.
    """

    def __init__(self, kv: ReceivedKV, part: Part = WHOLE) -> None:
        layout = kv.layout
        self.keys: list[list[Plane]] = []  # [layer][plane]
        self.values: list[list[Plane]] = []
        for index, (layer, keys, values) in enumerate(zip(layout.layers, kv.keys, kv.values, strict=True)):
            rows, heads = layer.rows(kv.tokens, kv.start), part.heads_of(layout, index)
            for layers, dim, buffers in ((self.keys, layer.key_dim, keys), (self.values, layer.value_dim, values)):
                sized = zip(plane_bytes(dim, layout.itemsize, kv.wire), buffers, strict=True)
                layers.append([Plane(rows, heads, size, buffer) for size, buffer in sized])
        self._states = kv.states
        self._missing_states = {
            (i, j) for i, states in enumerate(self._states) if part.has_states(layout, i) for j in range(len(states))
        }
        self._frames = 0
        self._bytes = 0

    def place(self, frame: Frame) -> list[memoryview]:
        """The memory for the next frame's payload, in wire order. ProtocolError if that frame may not come next."""
        views = self._place_state(frame) if frame.kind is Kind.STATE else self.place_rows(frame)
        self._frames += 1
        self._bytes += frame.length
        return views

    @property
    def nbytes(self) -> int:
        """Payload bytes of the frames so far."""
        return self._bytes

    def finish(self, totals: TransferTotals, digest: bytes) -> None:
        """The end of the part. ProtocolError if something is missing, IntegrityError if the digests differ."""
        self.require_complete()
        for layer, index in sorted(self._missing_states):
            raise ProtocolError(f"truncated: state {index} of layer {layer} is missing")
        if (totals.frames, totals.payload_bytes) != (self._frames, self._bytes):
            raise ProtocolError(
                f"the end frame counts {totals.frames} frames and {totals.payload_bytes} bytes, "
                f"{self._frames} and {self._bytes} arrived"
            )
        require_digest("the KV", digest, totals.digest)

    def end_chunk(self, frame: Frame, digest: bytes, sent: bytes) -> None:
        """A chunk frame. ProtocolError: without chunks none comes."""
        raise ProtocolError(f"the end of chunk [{frame.start}, {frame.end}) in a transfer without chunks")

    def place_rows(self, frame: Frame) -> list[memoryview]:
        """`place` for what is no state."""
        return self.plane(frame).place(frame)

    def plane(self, frame: Frame) -> Plane:
        """The plane of which a frame has rows. ProtocolError if there is none."""
        layers = {Kind.KEYS: self.keys, Kind.VALUES: self.values}.get(frame.kind)
        if layers is None:
            raise ProtocolError(f"a {frame.kind.name.lower()} frame in a transfer without chunks")
        if frame.layer >= len(layers) or frame.tensor >= len(layers[frame.layer]):
            raise ProtocolError(f"{name(frame)} is not part of the model")
        plane = layers[frame.layer][frame.tensor]
        if not plane.heads:
            raise ProtocolError(f"{name(frame)} is not in this connection's part")
        return plane

    def require_complete(self) -> None:
        """ProtocolError if a row is missing."""
        for what, layers in (("keys", self.keys), ("values", self.values)):
            for layer, index, plane in (
                (i, j, plane) for i, planes in enumerate(layers) for j, plane in enumerate(planes)
            ):
                if not plane.complete:
                    part = f"plane {index} of the {what}" if index else f"the {what}"
                    raise ProtocolError(f"truncated: {part} of layer {layer} end at {plane.next} of {plane.rows.stop}")

    def _place_state(self, frame: Frame) -> list[memoryview]:
        key = (frame.layer, frame.tensor)
        if key not in self._missing_states or frame.start or frame.end:
            raise ProtocolError(f"{name(frame)} is not expected, or was already received")
        buffer = self._states[frame.layer][frame.tensor]
        require_length(frame, buffer.nbytes)
        self._missing_states.remove(key)
        return [buffer.data]


@dataclass(slots=True)
class Plane:
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
        """The memory of the frame's rows, which come next."""
        if self.complete:
            raise ProtocolError(f"{name(frame)} comes after the last expected row")
        if frame.start != self.next:
            raise ProtocolError(f"{name(frame)} is out of order: row {self.next} comes next")
        if not frame.start < frame.end <= self.rows.stop:
            raise ProtocolError(f"{name(frame)} does not lie within rows [{self.rows.start}, {self.rows.stop})")
        require_length(frame, (frame.end - frame.start) * self.row_bytes * len(self.heads))
        self.next = frame.end
        return self.views(range(frame.start, frame.end))

    def views(self, rows: range, heads: range | None = None) -> list[memoryview]:
        """The memory of these rows of all heads, or of some: one slice per head, or one slice if these are all rows."""
        some = self.heads if heads is None else heads
        whole, stride = self.buffer.data, len(self.rows) * self.row_bytes
        if rows == self.rows:
            return [whole[some.start * stride : some.stop * stride]]
        first, size = (rows.start - self.rows.start) * self.row_bytes, len(rows) * self.row_bytes
        return [whole[head * stride + first : head * stride + first + size] for head in some]


def require_digest(what: str, digest: bytes, sent: bytes) -> None:
    """IntegrityError if the digest of what has arrived is not the sender's."""
    if digest != sent:
        raise IntegrityError(
            f"{what} was damaged on the way: its digest is {digest.hex()}, the sender's {sent.hex()}",
            "repeat the request; if it happens again, test the network link and the memory of both hosts",
        )


def require_length(frame: Frame, expected: int) -> None:
    """ProtocolError if a frame has not so many payload bytes."""
    if frame.length != expected:
        raise ProtocolError(f"{name(frame)} announces {frame.length} payload bytes, the layout has {expected}")


def name(frame: Frame) -> str:
    """A frame with rows or a state, as errors name it."""
    if frame.kind is Kind.STATE:
        return f"state {frame.tensor} of layer {frame.layer}"
    if frame.kind is Kind.HIDDEN:
        return f"the hidden states of tokens [{frame.start}, {frame.end})"
    plane = f"plane {frame.tensor} of " if frame.tensor else ""
    return f"rows [{frame.start}, {frame.end}) of {plane}the {frame.kind.name.lower()} of layer {frame.layer}"
