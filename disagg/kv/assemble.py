"""The buffers of one arriving KV cache: where each frame belongs, and whether all of it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.errors import IntegrityError, ProtocolError
from disagg.kv.arena import Arena, Buffer
from disagg.kv.frames import Frame, Kind, Totals
from disagg.kv.layout import Layout
from disagg.kv.received import ReceivedKV
from disagg.kv.wire import AS_IS, WireForm, plane_bytes


class Assembly:
    """The places of tokens [start, tokens) of `layout` in one arena, to be filled by frames in the protocol's order.

    Within one layer, kind and plane the rows come contiguous and ascending; beyond that all may interleave freely.
    """

    def __init__(self, layout: Layout, tokens: int, start: int, arena: Arena, wire: WireForm = AS_IS) -> None:
        self._kv = ReceivedKV(layout, tokens, arena, start, wire)
        self._keys: list[list[_Run]] = []  # [layer][plane]
        self._values: list[list[_Run]] = []
        for layer, keys, values in zip(layout.layers, self._kv.keys, self._kv.values, strict=True):
            rows = layer.rows(tokens, start)
            for runs, dim, buffers in ((self._keys, layer.key_dim, keys), (self._values, layer.value_dim, values)):
                sizes = plane_bytes(dim, layout.itemsize, wire)
                planes = zip(sizes, buffers, strict=True)
                runs.append([_Run(rows, layer.kv_heads, size, buffer) for size, buffer in planes])
        self._states = self._kv.states
        self._missing_states = {(i, j) for i, states in enumerate(self._states) for j in range(len(states))}
        self._frames = 0
        self._bytes = 0

    def place(self, frame: Frame) -> list[memoryview]:
        """Where the payload of the next frame goes, in wire order; ProtocolError where that frame may not come next."""
        views = self._place_state(frame) if frame.kind is Kind.STATE else self._place_rows(frame)
        self._frames += 1
        self._bytes += frame.length
        return views

    def finish(self, totals: Totals, digest: bytes) -> ReceivedKV:
        """The whole cache; ProtocolError where something is missing, IntegrityError where a bit was changed."""
        self._require_complete()
        if (totals.frames, totals.payload_bytes) != (self._frames, self._bytes):
            raise ProtocolError(
                f"the end frame counts {totals.frames} frames and {totals.payload_bytes} bytes, "
                f"{self._frames} and {self._bytes} arrived"
            )
        if totals.digest != digest:
            raise IntegrityError(
                f"the KV was changed on the way: its digest is {digest.hex()}, the sender's {totals.digest.hex()}",
                "repeat the request; if it happens again, test the network link and the memory of both hosts",
            )
        return self._kv

    def _place_rows(self, frame: Frame) -> list[memoryview]:
        runs = self._keys if frame.kind is Kind.KEYS else self._values
        if frame.layer >= len(runs) or frame.tensor >= len(runs[frame.layer]):
            raise ProtocolError(f"{_name(frame)} is not part of the model")
        return runs[frame.layer][frame.tensor].take(frame)

    def _place_state(self, frame: Frame) -> list[memoryview]:
        key = (frame.layer, frame.tensor)
        if key not in self._missing_states or frame.start or frame.end:
            raise ProtocolError(f"{_name(frame)} is not expected, or came before")
        buffer = self._states[frame.layer][frame.tensor]
        _require_length(frame, buffer.nbytes)
        self._missing_states.remove(key)
        return [buffer.data]

    def _require_complete(self) -> None:
        for name, runs in (("keys", self._keys), ("values", self._values)):
            for layer, plane, run in ((i, j, run) for i, planes in enumerate(runs) for j, run in enumerate(planes)):
                if not run.complete:
                    part = f"plane {plane} of the {name}" if plane else f"the {name}"
                    raise ProtocolError(f"truncated: {part} of layer {layer} end at {run.next} of {run.rows.stop}")
        for layer, index in sorted(self._missing_states):
            raise ProtocolError(f"truncated: state {index} of layer {layer} is missing")


@dataclass(slots=True)
class _Run:
    """One plane of the keys or the values of one layer, [heads, rows, row_bytes], filled from the first row on."""

    rows: range
    heads: int
    row_bytes: int
    buffer: Buffer
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.rows.start

    @property
    def complete(self) -> bool:
        return self.next == self.rows.stop or self.buffer.nbytes == 0

    def take(self, frame: Frame) -> list[memoryview]:
        """One slice per head for the frame's rows, or one slice for all where it brings every row."""
        if self.complete:
            raise ProtocolError(f"{_name(frame)} comes after the last expected row")
        if frame.start != self.next:
            raise ProtocolError(f"{_name(frame)} is out of order: row {self.next} comes next")
        if not frame.start < frame.end <= self.rows.stop:
            raise ProtocolError(f"{_name(frame)} does not lie within rows [{self.rows.start}, {self.rows.stop})")
        size = (frame.end - frame.start) * self.row_bytes
        _require_length(frame, size * self.heads)
        self.next = frame.end
        whole = self.buffer.data
        if size * self.heads == len(whole):
            return [whole]
        stride = len(self.rows) * self.row_bytes
        first = (frame.start - self.rows.start) * self.row_bytes
        return [whole[head * stride + first : head * stride + first + size] for head in range(self.heads)]


def _require_length(frame: Frame, expected: int) -> None:
    if frame.length != expected:
        raise ProtocolError(f"{_name(frame)} announces {frame.length} payload bytes, the layout has {expected}")


def _name(frame: Frame) -> str:
    if frame.kind is Kind.STATE:
        return f"state {frame.tensor} of layer {frame.layer}"
    plane = f"plane {frame.tensor} of " if frame.tensor else ""
    return f"rows [{frame.start}, {frame.end}) of {plane}the {frame.kind.name.lower()} of layer {frame.layer}"
