"""The transfer of one prompt's KV, from the request that asks for it to its end."""

from __future__ import annotations

import threading

from disagg.errors import Cancelled
from disagg.kv.send import Transfer, TransferResult
from disagg.kv.wire.frames import Header


class Delivery:
    """The transfer of one prompt's KV, opened when its computation begins.

    `open` and `finish` are called on worker threads, the rest anywhere."""

    def __init__(self, to: tuple[str, int], header: Header, deadline: float) -> None:
        self.header = header
        self._to = to
        self._deadline = deadline
        self._transfer: Transfer | None = None
        self._ended = False

    def open(self) -> Transfer:
        """The transfer; begins it at the first call. Raises Cancelled after `end`."""
        if self._transfer is None:
            self._transfer = Transfer(*self._to, self.header, deadline=self._deadline)
            if self._ended:  # meanwhile
                self._transfer.abort()
        if self._ended:
            raise Cancelled("the request was cancelled before its KV was sent")
        return self._transfer

    def finish(self) -> TransferResult:
        """Wait until the decode host has acknowledged all KV."""
        result = self.open().finish()
        self._ended = True
        return result

    def queued_bytes(self) -> int:
        """KV that waits to be sent; 0 after a failure, which the next step is to find."""
        transfer = self._transfer
        return transfer.queued_bytes if transfer is not None and transfer.failed is None else 0

    def end(self) -> None:
        """Abort the transfer unless it has finished. Does not wait."""
        finished, self._ended = self._ended, True
        if self._transfer is not None and not finished:
            threading.Thread(target=self._transfer.abort, name="kv-abort", daemon=True).start()
