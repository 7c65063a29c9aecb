"""The events of a response, and what its progress events say about its host."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from disagg.api.events import ERROR, EVENTS, ErrorEvent, Event, ProgressEvent
from disagg.config import Host
from disagg.errors import DisaggError, Overloaded, ProtocolError, ServerSilent, ServerUnavailable
from disagg.inference.policy import Timeouts

MAX_EVENT_BYTES = 4 << 20
COMPUTING: Final = ("computing the prompt", "generating")
"""The phases in which a request's host must make progress."""
QUEUED: Final = ("arriving", "tokenising", "queued")
"""The phases before a host has begun with a request."""

_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()}
_ERRORS = msgspec.json.Decoder(ErrorEvent)


@dataclass(slots=True)
class ProgressJudge:
    """Judges a host by the progress events of one request. Pure.

    written: when the request was sent. beats: as the last event stated them, since `since`. queued: the host has not
    begun.
    """

    host: Host
    timeouts: Timeouts
    written: float
    queued: bool = True
    beats: int = -1
    since: float = 0.0

    def problem(self, event: ProgressEvent, now: float) -> DisaggError | None:
        """Why the host is given up; None if it gets on."""
        if event.beats != self.beats or event.phase not in COMPUTING:
            self.beats, self.since = event.beats, now
        self.queued = self.queued and event.phase in QUEUED
        host, stalled_s, queued_s = self.host, now - self.since, now - self.written
        if stalled_s >= self.timeouts.stall:
            return ServerSilent(
                f"{host.name} ({host.url}) is stuck: {event.phase}, and its engine has made no progress for "
                f"{stalled_s:.0f} s",
                f"run `disagg restart --host {host.name}`",
            )
        if self.queued and queued_s >= self.timeouts.queue:
            return Overloaded(f"{host.name} has not begun with the request in {queued_s:.0f} s", "see `disagg status`")
        return None


async def parse(
    read: Callable[[], Awaitable[bytes]], progress: ProgressJudge, reported: Callable[[str], None] | None
) -> AsyncGenerator[Event, None]:
    """The events of a response but `progress`. Events of unknown names are skipped; an `error` event is raised.

    read: gives the next piece of the response, empty at its end. reported: is called with the phase that each progress
    event states.
    """
    name, buffer, host = "", bytearray(), progress.host
    while part := await read():
        buffer += part
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                event = _decoded(name, line[6:])
                if isinstance(event, ProgressEvent):
                    if reported is not None:
                        reported(event.phase)
                    if problem := progress.problem(event, time.monotonic()):
                        raise problem
                elif event is not None:
                    progress.queued = False
                    yield event
        if len(buffer) > MAX_EVENT_BYTES:
            raise ProtocolError(f"{host.name} sent an event of over {MAX_EVENT_BYTES} bytes")
    raise ServerUnavailable(f"{host.name} closed the stream before the answer was complete", "see its log")


def _decoded(name: str, data: bytes) -> Event | None:
    if name == ERROR:
        raise DisaggError.from_json(_ERRORS.decode(data).to_json())
    return _DECODERS[name].decode(data) if name in _DECODERS else None
