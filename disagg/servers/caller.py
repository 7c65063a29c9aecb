"""State that a request and the stream of its answer share, beside the events."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from disagg.errors import DisaggError
from disagg.servers.request import ActiveRequest

current: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller whose request this task works on. The stream sets it, the service reads it."""


class Caller:
    """The caller of one request. Create it on the event loop.

    The service sets `request` when it admits it, and may `end` it at any time: the stream then sends the error at
    once, even if the request's own task is stuck, and cancels that task.
    """

    def __init__(self) -> None:
        self.request: ActiveRequest | None = None
        self.ended: asyncio.Future[DisaggError] = asyncio.get_running_loop().create_future()

    @property
    def phase(self) -> str:
        return self.request.stated_phase if self.request else "arriving"

    @property
    def error(self) -> DisaggError | None:
        """Why the service has ended the request; None if it has not."""
        return self.ended.result() if self.ended.done() else None

    def end(self, error: DisaggError) -> None:
        """End the request with this error. Only the first call has an effect."""
        if not self.ended.done():
            self.ended.set_result(error)
