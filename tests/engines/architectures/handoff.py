"""A prompt's KV from a prefill engine to a decode engine in one process, through the wire's frames."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.api.names import AS_IS, WireForm
from disagg.engines.base import EmittingEngine
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.kv.arena import Arenas
from disagg.kv.blocks import Block, KVBlock, StateBlock
from disagg.kv.frames import Digest, TransferTotals, decode_frame, encode_frame
from disagg.kv.outbox import frames_of
from disagg.kv.receive.assembly import Assembly
from disagg.kv.received import ByteRanges, ReceivedKV


def hand_over(
    prefill: EmittingEngine,
    decode: MLXDecodeEngine,
    tokens: Sequence[int],
    *,
    start: int = 0,
    wire: WireForm = AS_IS,
    chunk_tokens: int | None = None,
    salt: str = "",
) -> ReceivedKV:
    """KV of `tokens` from `start` on, computed by one engine and in the memory of the other."""
    layout = decode.info.layout
    layout.require_same(prefill.info.layout, mine="mlx-lm", theirs="transformers")
    arena = Arenas(decode.allocate).acquire(ByteRanges.of(layout, len(tokens), start, wire).nbytes)
    kv = ReceivedKV(layout, len(tokens), arena, start, wire)
    assembly, digest, count = Assembly(kv), Digest(), 0

    def emit(block: Block) -> None:
        nonlocal count
        assert isinstance(block, KVBlock | StateBlock)
        if block.wait is not None:
            block.wait()
        for frame, payload in frames_of(block, layout, wire):
            sent, views = b"".join(payload), assembly.place(decode_frame(encode_frame(frame)))
            for view in views:
                view[:], sent = sent[: len(view)], sent[len(view) :]
            count += 1

    run = prefill.start(tokens, emit, start=start, wire=wire, salt=salt, chunk_tokens=chunk_tokens)
    while not run.done:
        run.step()
    run.close()
    assembly.finish(TransferTotals(count, assembly.nbytes, digest.end()), digest.end())
    return kv
