"""The events of a response, and what its progress events say about its host."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from math import inf
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


@dataclass(frozen=True, slots=True)
class Patience:
    """When a request leaves a host's queue: after `seconds` in it, if another host would begin with it at once.

    claim: takes a free place at another host of this one's role, which then is the request's; False if there is none.
    """

    seconds: float = inf
    claim: Callable[[], bool] = lambda: False


UNLIMITED: Final = Patience()


@dataclass(slots=True)
class ProgressJudge:
    """Judges a host by the progress events of one request. No I/O, no clock; may claim a place elsewhere.

    queued_since: the host has not gone on with the request since then; None while it has. has_begun: it has gone on
    with it before. beats: as the last event stated them. stalled_since: they have not changed since then, while the
    request was computed.
    """

    host: Host
    timeouts: Timeouts
    queued_since: float | None
    patience: Patience = UNLIMITED
    has_begun: bool = False
    beats: int = -1
    stalled_since: float = 0.0

    def problem(self, event: ProgressEvent, now: float) -> DisaggError | None:
        """Why the host is given up; None if it gets on."""
        if event.beats != self.beats or event.phase not in COMPUTING:
            self.beats, self.stalled_since = event.beats, now
        if event.phase not in QUEUED:
            self.begun()
        elif self.queued_since is None:
            self.queued_since = now
        host, stalled_s = self.host, now - self.stalled_since
        queued_s = 0.0 if self.queued_since is None else now - self.queued_since
        if stalled_s >= self.timeouts.stall:
            return ServerSilent(
                f"{host.name} ({host.url}) is stuck: {event.phase}, and its engine has made no progress for "
                f"{stalled_s:.0f} s",
                f"run `disagg restart --host {host.name}`",
            )
        if queued_s >= self.timeouts.queue or self._begins_sooner_elsewhere(queued_s):
            return Overloaded(f"{host.name} has not begun with the request in {queued_s:.0f} s", "see `disagg status`")
        return None

    def begun(self) -> None:
        """The host has gone on with the request."""
        self.queued_since, self.has_begun = None, True

    def _begins_sooner_elsewhere(self, queued_s: float) -> bool:
        """Whether another host begins sooner. A place in a queue is given up only for a host that has room: at the end
        of another queue the request would wait again. A request that its host has gone on with stays: it may have KV
        there, and waits for its place in the batch."""
        return not self.has_begun and queued_s >= self.patience.seconds and self.patience.claim()


async def parse(
    read: Callable[[], Awaitable[bytes]], progress: ProgressJudge, reported: Callable[[str], None] | None
) -> AsyncGenerator[Event, None]:
    """The events of a response but `progress`. Events of unknown names are skipped; an `error` event is raised, and
    TimeoutError if nothing else comes within the time that a host may be silent.

    read: gives the next piece of the response, empty at its end. reported: is called with the phase that each progress
    event states.
    """
    name, buffer, host, known_at = "", bytearray(), progress.host, time.monotonic()
    while part := await read():
        buffer += part
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                event = _decoded(name, line[6:])
                known_at = known_at if event is None else time.monotonic()
                if isinstance(event, ProgressEvent):
                    if reported is not None:
                        reported(event.phase)
                    if problem := progress.problem(event, time.monotonic()):
                        raise problem
                elif event is not None:
                    progress.begun()
                    yield event
        if len(buffer) > MAX_EVENT_BYTES:
            raise ProtocolError(f"{host.name} sent an event of over {MAX_EVENT_BYTES} bytes")
        if time.monotonic() - known_at >= progress.timeouts.silence:
            raise TimeoutError
    raise ServerUnavailable(f"{host.name} closed the stream before the answer was complete", "see its log")


def _decoded(name: str, data: bytes) -> Event | None:
    if name == ERROR:
        raise DisaggError.from_json(_ERRORS.decode(data).to_json())
    return _DECODERS[name].decode(data) if name in _DECODERS else None
