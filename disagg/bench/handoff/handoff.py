"""disagg's own way: torch tensors through RowEmitter, Transfer and KVServer into ready mlx-lm caches."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any

from disagg.bench.handoff.way import LONG_S, PATIENCE_S, Shape
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.simulated import synthetic_kv
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.received import ReceivedKV
from disagg.kv.send import Transfer
from disagg.kv.tickets import KEEP_SHARE, Expected, KVOutcome, Tickets

_FINGERPRINT = Fingerprint("rehearsal", 1, "none", "none", "none", "none")
_REQUEST = "rehearsal"


class HandoffSender:
    """See way.Sender."""

    def __init__(self, shape: Shape, source: SyntheticKV) -> None:
        self._shape = shape
        self._source = source
        self._transfer: Transfer | None = None

    def prepare(self, offer: dict[str, Any]) -> None:
        header = Header(offer["ticket"], _REQUEST, _FINGERPRINT, self._shape.layout, token_hash([]), self._shape.tokens)
        deadline = time.monotonic() + LONG_S
        self._transfer = Transfer.open(offer["host"], offer["port"], header, deadline=deadline)

    def send(self) -> None:
        assert self._transfer is not None, "prepare comes first"
        self._source.emit(self._transfer.send)
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
        self._arrived: queue.Queue[KVOutcome] = queue.Queue()

    def offer(self) -> dict[str, Any]:
        expected = Expected(_REQUEST, self._shape.layout, _FINGERPRINT, token_hash([]), self._shape.tokens)
        slot = self._tickets.issue(expected, self._arrived.put, deadline=time.monotonic() + LONG_S)
        return {"host": self._server.host, "port": self._server.port, "ticket": slot.ticket}

    def accept(self) -> None:
        """The transfer's header was its introduction."""

    def receive(self) -> Sequence[Any]:
        result = self._arrived.get(timeout=LONG_S + PATIENCE_S)  # the ticket ends before
        if not isinstance(result, ReceivedKV):
            raise result
        tensors = synthetic_kv.ingest(result)
        result.release(reuse=True)  # the bytes are looked at before the next transfer begins
        return tensors

    def close(self) -> None:
        self._server.close()
