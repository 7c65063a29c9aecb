"""disagg's own hand-off of the same bytes: blocks of 2048 tokens through Transfer and KVServer into ready MLX caches.

As with every other transport here, the buffers exist before the clock starts: the receiver allocates them while a
prefill would compute its first chunk, so the sender waits for that time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.peers import memory
from benchmarks.peers.memory import Tensor
from benchmarks.peers.pair import TIMEOUT_S, Transport
from disagg.api.layout import LayerLayout, Layout
from disagg.kv.arena import Arenas
from disagg.kv.blocks import KVBlock
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer

FIRST_CHUNK_S = 0.5
_LAYER = LayerLayout("full", kv_heads=memory.KV_HEADS, key_dim=memory.HEAD_DIM, value_dim=memory.HEAD_DIM)
_LAYOUT = Layout((_LAYER,) * memory.LAYERS, "bfloat16")
_FINGERPRINT = Fingerprint("benchmark", 1, "none", "none", "none", "none")


class HandoffSender:
    """See pair.Sender."""

    def __init__(self, tensors: list[Tensor], pipe: Connection) -> None:
        self._tokens = tensors[0].nbytes // memory.TOKEN_BYTES
        self._blocks = blocks(tensors, self._tokens)
        self._transfer: Transfer | None = None

    def prepare(self, offer: tuple[int, str]) -> None:
        port, ticket = offer
        header = Header(ticket, "benchmark", _FINGERPRINT, _LAYOUT, token_hash([]), self._tokens)
        self._transfer = Transfer.open("127.0.0.1", port, header, deadline=time.monotonic() + TIMEOUT_S)
        time.sleep(FIRST_CHUNK_S)

    def send(self) -> None:
        assert self._transfer is not None, "prepare comes first"
        for block in self._blocks:
            self._transfer.send(block)
        self._transfer.finish()


class HandoffReceiver:
    """See pair.Receiver."""

    def __init__(self, tokens: int, pipe: Connection) -> None:
        self._tokens = tokens
        from disagg.engines.mlx import memory as mlx_memory

        # Room for twice the bytes of one transfer, so that the memory of the warm-up is kept for the timed one.
        self._tickets = Tickets(Arenas(mlx_memory.allocate, keep_bytes=2 * memory.nbytes_of(tokens)))
        self._server = KVServer("127.0.0.1", 0, self._tickets)
        self._outcomes: queue.Queue[KVOutcome] = queue.Queue()

    def offer(self) -> tuple[int, str]:
        expected = Expected("benchmark", _LAYOUT, _FINGERPRINT, token_hash([]), self._tokens)
        slot = self._tickets.issue(expected, self._outcomes.put, deadline=time.monotonic() + TIMEOUT_S)
        return self._server.port, slot.ticket

    def accept(self, answer: None) -> None:
        pass

    def receive(self) -> Sequence[Tensor]:
        outcome = self._outcomes.get(timeout=TIMEOUT_S)
        if not isinstance(outcome, ReceivedKV):
            raise outcome
        caches = _ready_caches(outcome)
        tensors = [_bytes_of(array) for cache in caches for array in (cache.keys, cache.values)]
        outcome.release(reuse=True)  # the bytes are read before the next transfer begins
        return tensors


def blocks(tensors: Sequence[Tensor], tokens: int) -> list[KVBlock]:
    """The tensors as a chunked prefill emits them: chunk by chunk, layer by layer, one view per head."""
    heads = [tensor.reshape(memory.KV_HEADS, tokens, -1) for tensor in tensors]
    return [
        KVBlock(layer, start, end, _views(heads[2 * layer], start, end), _views(heads[2 * layer + 1], start, end))
        for start, end in zip(
            range(0, tokens, memory.BLOCK_TOKENS),
            range(memory.BLOCK_TOKENS, tokens + 1, memory.BLOCK_TOKENS),
            strict=True,
        )
        for layer in range(memory.LAYERS)
    ]


def _views(heads: Any, start: int, end: int) -> list[memoryview]:
    return [memoryview(head[start:end].reshape(-1)) for head in heads]


def _ready_caches(kv: ReceivedKV) -> list[Any]:
    from disagg.engines.mlx import cache as mlx_cache

    return mlx_cache.build(SimpleNamespace(layers=range(memory.LAYERS)), kv)


def _bytes_of(array: Any) -> Tensor:
    """An mlx array's own memory, as bytes."""
    return np.frombuffer(memoryview(array).cast("B"), np.uint8)


TRANSPORT = Transport(HandoffSender, HandoffReceiver, {})
