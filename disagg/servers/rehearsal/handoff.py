"""disagg's own way: torch tensors through RowEmitter, Transfer and KVServer into ready mlx-lm caches."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy

from disagg.engines import mlx_cache
from disagg.engines.transformers_emit import RowEmitter
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.received import ReceivedKV
from disagg.kv.send import Transfer
from disagg.kv.tickets import KEEP_SHARE, Expected, Result, Tickets
from disagg.servers.rehearsal.way import CHUNK_TOKENS, PATIENCE_S, Shape, Source

_FINGERPRINT = Fingerprint("rehearsal", 1, "none", "none", "none", "none")
_REQUEST = "rehearsal"


class HandoffSender:
    """See way.Sender."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._transfer: Transfer | None = None

    def prepare(self, offer: dict[str, Any]) -> None:
        shape = self._source.shape
        header = Header(offer["ticket"], _REQUEST, _FINGERPRINT, shape.layout, token_hash([]), shape.tokens)
        deadline = time.monotonic() + PATIENCE_S
        self._transfer = Transfer.open(offer["host"], offer["port"], header, deadline=deadline)

    def send(self) -> None:
        assert self._transfer is not None, "prepare comes first"
        shape = self._source.shape
        emit = RowEmitter(shape.layout, shape.tokens, self._source.device, self._transfer.send)
        kept = [layer.rows(shape.tokens) for layer in shape.layout.layers]
        for start in range(0, shape.tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, shape.tokens)
            for layer, (keys, values) in enumerate(self._source.tensors):
                first = max(start, kept[layer].start)
                if first < end:
                    rows = slice(first - kept[layer].start, end - kept[layer].start)
                    emit(layer, first, keys[:, :, rows], values[:, :, rows])
        self._transfer.finish()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.abort()


class HandoffReceiver:
    """See way.Receiver."""

    def __init__(self, shape: Shape, host: str) -> None:
        self._shape = shape
        # The memory of one transfer lies idle for the next, as it does on a decode host.
        self._tickets = Tickets(max_kv_bytes=2 * KEEP_SHARE * shape.nbytes, allocate=mlx_cache.allocate)
        self._server = KVServer(host, 0, self._tickets)
        self._arrived: queue.Queue[Result] = queue.Queue()
        kinds = [layer.window for layer in shape.layout.layers]
        self._model = SimpleNamespace(make_cache=lambda: [_cache(window) for window in kinds])

    def offer(self) -> dict[str, Any]:
        expected = Expected(_REQUEST, self._shape.layout, _FINGERPRINT, token_hash([]), self._shape.tokens)
        slot = self._tickets.issue(expected, self._arrived.put, deadline=time.monotonic() + PATIENCE_S)
        return {"host": self._server.host, "port": self._server.port, "ticket": slot.ticket}

    def accept(self) -> None:
        """The transfer's header was its introduction."""

    def receive(self) -> Sequence[Any]:
        result = self._arrived.get(timeout=PATIENCE_S)
        if not isinstance(result, ReceivedKV):
            raise result
        caches = mlx_cache.build(self._model, result)
        tensors = [_bytes_of(array) for cache in caches for array in (cache.keys, cache.values)]
        result.release(reuse=True)  # the bytes are looked at before the next transfer begins
        return tensors

    def close(self) -> None:
        self._server.close()


def _cache(window: int | None) -> Any:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    return KVCache() if window is None else RotatingKVCache(window)


def _bytes_of(array: Any) -> Any:
    """An mlx array's own memory, as bytes."""
    return numpy.frombuffer(memoryview(array).cast("B"), numpy.uint8)
