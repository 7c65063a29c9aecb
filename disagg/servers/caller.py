"""The caller of a request, as the service sees it beside the events that it yields."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol

from disagg.api.events import Event
from disagg.errors import DisaggError
from disagg.servers.request import ActiveRequest

STATE_S: Final = 0.05


class EventWriter(Protocol):
    """Sends events without a task to wait in."""

    @property
    def ready(self) -> bool:
        """Whether the caller takes an event now, and all before it have been sent."""
        ...

    def write_event(self, event: Event) -> None:
        """Send an event at once; only if it is ready."""
        ...


class Caller:
    """The caller of one request. Create it on the event loop.

    The service sets `request` when it admits it, and may `end` it at any time: the stream then sends the error at
    once, even if the request's own task is stuck, and cancels that task.
    """

    def __init__(
        self,
        request_id: str,
        progress: Callable[[], Awaitable[None]] | None = None,
        writer: EventWriter | None = None,
    ) -> None:
        """progress: sends a progress event. writer: None if the caller gets what the service yields and no more."""
        self.request_id = request_id
        self.request: ActiveRequest | None = None
        self.writer = writer
        self.stated = ""  # the phase in the last progress event
        self._progress = progress
        self.ended: asyncio.Future[DisaggError] = asyncio.get_running_loop().create_future()

    @property
    def phase(self) -> str:
        return self.request.stated_phase if self.request else "arriving"

    async def state_begin(self) -> None:
        """The request is about to be computed. A caller that knows only that it waits is told so first: if this process
        ends now, the caller takes the request for a suspect, see disagg/strikes.py. Waits STATE_S at most."""
        if self.stated == "queued" and self._progress is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STATE_S):
                    await self._progress()

    @property
    def error(self) -> DisaggError | None:
        """Why the service has ended the request; None if it has not."""
        return self.ended.result() if self.ended.done() else None

    def end(self, error: DisaggError) -> None:
        """End the request with this error. Only the first call has an effect."""
        if not self.ended.done():
            self.ended.set_result(error)
