"""disagg's own transport: torch tensors through RowEmitter, Transfer and KVServer into ready mlx-lm caches."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any

from disagg.bench.handoff.transport import ROUND_TIMEOUT_S, STEP_TIMEOUT_S, RandomKV, ReceiverOffer
from disagg.engines.simulated import synthetic_kv
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.kv.arena import Arenas
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer

_FINGERPRINT = Fingerprint("benchmark", 1, "none", "none", "none", "none")
_REQUEST = "benchmark"


class HandoffSender:
    """See transport.Sender."""

    def __init__(self, shape: RandomKV, source: SyntheticKV) -> None:
        self._shape = shape
        self._source = source
        self._transfer: Transfer | None = None

    def prepare(self, offer: ReceiverOffer) -> None:
        header = Header(offer.ticket, _REQUEST, _FINGERPRINT, self._shape.layout, token_hash([]), self._shape.tokens)
        deadline = time.monotonic() + ROUND_TIMEOUT_S
        self._transfer = Transfer.open(offer.host, offer.port, header, deadline=deadline)

    def send(self) -> None:
        assert self._transfer is not None, "prepare comes first"
        self._source.emit(self._transfer.send)
        self._transfer.finish()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.abort()


class HandoffReceiver:
    """See transport.Receiver."""

    def __init__(self, shape: RandomKV, host: str) -> None:
        from disagg.engines.mlx import cache as mlx_cache  # the sending host need not have mlx

        self._shape = shape
        # The memory of one transfer is kept for the next, as on a decode host.
        self._tickets = Tickets(Arenas(mlx_cache.allocate, keep_bytes=2 * shape.nbytes))
        self._server = KVServer(host, 0, self._tickets)
        self._outcomes: queue.Queue[KVOutcome] = queue.Queue()

    def offer(self) -> ReceiverOffer:
        expected = Expected(_REQUEST, self._shape.layout, _FINGERPRINT, token_hash([]), self._shape.tokens)
        slot = self._tickets.issue(expected, self._outcomes.put, deadline=time.monotonic() + ROUND_TIMEOUT_S)
        return ReceiverOffer(host=self._server.host, port=self._server.port, ticket=slot.ticket)

    def accept(self) -> None:
        """Nothing to do: the transfer's header carries the ticket."""

    def receive(self) -> Sequence[Any]:
        outcome = self._outcomes.get(timeout=ROUND_TIMEOUT_S + STEP_TIMEOUT_S)  # the ticket's deadline is earlier
        if not isinstance(outcome, ReceivedKV):
            raise outcome
        tensors = synthetic_kv.ingest(outcome)
        outcome.release(reuse=True)  # the bytes are read before the next transfer begins
        return tensors

    def close(self) -> None:
        self._server.close()
