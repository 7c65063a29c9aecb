"""The blocks of one transfer that are not sent yet, as frames: the compute thread puts them, the sender thread takes
them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.api.layout import LayerLayout, Layout, plane_bytes
from disagg.api.names import AS_IS, WireForm
from disagg.errors import DisaggError, PeerLost, ProtocolError
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock
from disagg.kv.frames import DIGEST_BYTES, MAX_TOKENS, Frame, Kind
from disagg.kv.parts import WHOLE, Part


@dataclass(frozen=True, slots=True)
class FramedBlock:
    """A block ready to send: its `wait` (see KVBlock), and its frames with their payloads. chunk: the number of the one
    that it belongs to; states belong to none."""

    wait: Callable[[], None] | None
    frames: list[tuple[Frame, list[memoryview]]]
    chunk: int = -1

    @property
    def nbytes(self) -> int:
        return sum(frame.length for frame, _ in self.frames)


class Outbox:
    """A queue that never makes its writer wait, and the failure that ended the transfer. Safe to use from any thread.

    Blocks are views of memory that exists anyway, so the queue counts bytes, not blocks. max_bytes: the transfer fails
    beyond it; whoever computes is expected to pause long before.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._blocks: deque[FramedBlock] = deque()
        self._bytes = 0
        self._ended = False
        self._failure: DisaggError | None = None

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were put and are not sent yet."""
        return self._bytes

    @property
    def failure(self) -> DisaggError | None:
        """The first failure, None while there is none."""
        return self._failure

    def put(self, block: FramedBlock) -> None:
        """Queue a block. Raises the failure if there is one; fails with PeerLost if the queue would be too long."""
        with self._changed:
            nbytes = block.nbytes
            if self._failure is None and self._bytes + nbytes > self._max_bytes:
                self._fail(PeerLost(f"{self._bytes} bytes of KV wait to be sent, at most {self._max_bytes} may"))
            self._raise_failure()
            self._blocks.append(block)
            self._bytes += nbytes
            self._changed.notify_all()

    def end(self) -> None:
        """There are no more blocks. Raises the failure if there is one."""
        with self._changed:
            self._raise_failure()
            self._ended = True
            self._changed.notify_all()

    def take(self, timeout: float, allowed: float = math.inf) -> FramedBlock | None:
        """The next block, or None after the last one. TimeoutError if there is none yet, or if it is one of a chunk
        from number `allowed` on; raises the failure if there is one. Its bytes count as queued until `sent`."""

        def ready() -> bool:
            return self._blocks[0].chunk < allowed if self._blocks else self._ended

        with self._changed:
            self._changed.wait_for(lambda: ready() or self._failure is not None, timeout)
            self._raise_failure()
            if not ready():
                raise TimeoutError
            return self._blocks.popleft() if self._blocks else None

    def sent(self, nbytes: int) -> None:
        """So many bytes of a taken block were sent."""
        with self._changed:
            if self._failure is None:  # else nothing counts as queued any more
                self._bytes -= nbytes

    def fail(self, error: DisaggError) -> None:
        """End with this failure unless there was one before: it is the cause, later ones are its consequences."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: DisaggError) -> None:
        self._failure = self._failure or error
        self._blocks.clear()
        self._bytes = 0
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def frames_of(
    block: Block, layout: Layout, wire: WireForm = AS_IS, part: Part = WHOLE, hidden_bytes: int = 0
) -> list[tuple[Frame, list[memoryview]]]:
    """The frames that carry a block, each with its payload; that of a chunk's end follows from what was sent before.
    hidden_bytes: of one token's hidden state. ProtocolError if the block does not fit the layout and the part."""
    if isinstance(block, StateBlock):
        layer = _layer(layout, block.layer)
        sizes = [state.nbytes for state in layer.states] if part.has_states(layout, block.layer) else []
        views = _fitting(block.tensors, sizes, f"the state of layer {block.layer}")
        return [(Frame(Kind.STATE, block.layer, i, 0, 0, len(v)), [v]) for i, v in enumerate(views)]
    if not 0 <= block.start < block.end <= MAX_TOKENS:
        raise ProtocolError(f"a block with rows [{block.start}, {block.end})")
    if isinstance(block, ChunkEnd):
        return [(Frame(Kind.CHUNK, 0, 0, block.start, block.end, DIGEST_BYTES), [])]
    if isinstance(block, HiddenBlock):
        size = (block.end - block.start) * hidden_bytes
        if not size or not part.hidden:
            raise ProtocolError("a block with hidden states, which this transfer does not carry")
        views = _fitting([block.rows], [size], "the hidden states")
        return [(Frame(Kind.HIDDEN, 0, 0, block.start, block.end, size), views)]
    return _frames_of_rows(block, layout, wire, part)


def _frames_of_rows(block: KVBlock, layout: Layout, wire: WireForm, part: Part) -> list[tuple[Frame, list[memoryview]]]:
    layer = _layer(layout, block.layer)
    heads = len(part.heads_of(layout, block.layer))
    if not heads:
        raise ProtocolError(f"a block of layer {block.layer}, of which this transfer carries no KV head")
    frames: list[tuple[Frame, list[memoryview]]] = []
    for kind, given, dim in ((Kind.KEYS, block.keys, layer.key_dim), (Kind.VALUES, block.values, layer.value_dim)):
        if dim == 0:  # a latent cache has keys only
            continue
        sizes = [(block.end - block.start) * size for size in plane_bytes(dim, layout.itemsize, wire)]
        expected = [size for size in sizes for _ in range(heads)]
        views = _fitting(given, expected, f"the {kind.name.lower()} of layer {block.layer}")
        for plane, size in enumerate(sizes):
            frame = Frame(kind, block.layer, plane, block.start, block.end, size * heads)
            frames.append((frame, views[plane * heads : (plane + 1) * heads]))
    return frames


def _layer(layout: Layout, layer: int) -> LayerLayout:
    if not 0 <= layer < len(layout.layers):
        raise ProtocolError(f"a block for layer {layer} of a model with {len(layout.layers)} layers")
    return layout.layers[layer]


def _fitting(views: Sequence[memoryview], sizes: Sequence[int], what: str) -> list[memoryview]:
    given = [view.nbytes for view in views]
    if given != list(sizes):
        raise ProtocolError(f"a block carries {given} bytes for {what}, the layout has {list(sizes)}")
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]
