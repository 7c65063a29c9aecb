"""Watch a fleet: readings of its health -> hosts that went down or came back, each delivered to a command or a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import TracebackType
from typing import Final, Literal

import httpx
import msgspec

from disagg.api.host_change import HostChange
from disagg.config import Fleet
from disagg.errors import Cancelled, ConfigError, DisaggError, FleetError
from disagg.fleet.changes.hooks import run_line
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.machine import interruption
from disagg.fleet.machine.interruption import interrupted_by


@dataclass(slots=True)
class _HostState:
    """What the readings so far show of a host. up: None until that is decided. since: when it went up or down, None if
    that was before the first reading.
    misses: readings in a row in which it was not healthy, the first of them at `missed`."""

    up: bool | None = None
    since: float | None = None
    misses: int = 0
    missed: float = 0.0


@dataclass(slots=True)
class FleetWatch:
    """A host is down after `misses` readings in a row in which it was not healthy, and up after one in which it was.

    A host that is up when the watch begins is no change; one that is down is.
    """

    fleet: str
    misses: int = 2
    _hosts: dict[str, _HostState] = field(default_factory=dict)

    def update(self, statuses: Sequence[HostStatus], now: float) -> list[HostChange]:
        """The changes that this reading shows. now: seconds since 1970."""
        changes = (self._healthy(status, now) if status.ok else self._missed(status, now) for status in statuses)
        return [change for change in changes if change is not None]

    def _healthy(self, status: HostStatus, now: float) -> HostChange | None:
        host = self._hosts.setdefault(status.host, _HostState())
        before, since = host.up, host.since
        host.misses, host.up = 0, True
        if before is True:
            return None
        host.since = now if before is False else None
        return self._change("up", status, now, since) if before is False else None

    def _missed(self, status: HostStatus, now: float) -> HostChange | None:
        host = self._hosts.setdefault(status.host, _HostState())
        host.misses += 1
        if host.misses == 1:
            host.missed = now
        if host.misses < self.misses or host.up is False:
            return None
        since, host.up = host.since, False
        host.since = host.missed
        return self._change("down", status, now, since)

    def _change(self, change: Literal["down", "up"], status: HostStatus, now: float, since: float | None) -> HostChange:
        down = change == "down"
        return HostChange(
            self.fleet,
            status.host,
            change,
            status.state,
            now,
            status.roles,
            status.model,
            status.why if down else "",
            status.hint if down else "",
            max(0.0, now - since) if since is not None else None,
        )


def explained(change: HostChange, status: HostStatus | None) -> HostChange:
    """The change with the state and the reason of this status, which its machine explained; as it is without one."""
    if status is None:
        return change
    return msgspec.structs.replace(change, state=status.state, why=status.why, hint=status.hint)


MAX_WAITING: Final = 100
"""Changes that may wait for their delivery."""
_POLL_S: Final = 0.2
_END_S: Final = 5.0
"""How long the end may wait for a command, which is killed, or for an attempt to post."""


@dataclass(frozen=True, slots=True)
class PostPolicy:
    """How a change is posted. timeout_s: of an attempt, up to the end of the answer's head; only the look-up of a name
    that hangs may take longer. pauses_s: between two attempts, so there is one more."""

    timeout_s: float = 10.0
    pauses_s: tuple[float, ...] = (1.0, 4.0, 16.0)


def is_retryable(code: int) -> bool:
    """Whether an answer with this HTTP code may be another one the next time."""
    return code == httpx.codes.TOO_MANY_REQUESTS or code >= 500


@dataclass(frozen=True, slots=True)
class Poster:
    """Posts changes as JSON to a URL. transport: instead of the network and of the environment's proxies."""

    url: str
    policy: PostPolicy = PostPolicy()
    sleep: Callable[[float], object] = interruption.sleep
    transport: httpx.AsyncBaseTransport | None = None

    def check(self) -> None:
        """ConfigError if a proxy or the certificates that the environment names cannot be used. The errors of httpx may
        have a proxy's password."""
        try:
            self._client()
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            why = ": a SOCKS proxy needs the package socksio" if isinstance(error, ImportError) else ""
            raise ConfigError(
                f"nothing can be posted with the proxy or the certificates of the environment{why}",
                "correct or unset HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE",
            ) from error

    def __call__(self, change: HostChange) -> None:
        """Raises FleetError if no attempt succeeds. It names the host of the URL only: the path may be a secret."""
        why = ""
        for pause in (0.0, *self.policy.pauses_s):
            self.sleep(pause)
            why, again = self._attempt(change)
            if not why:
                return
            if not again:
                break
        raise FleetError(f"{httpx.URL(self.url).host} did not take the change of {change.host}: {why}")

    def _attempt(self, change: HostChange) -> tuple[str, bool]:
        """Why it failed, "" if it did not; and whether another attempt may help."""
        try:
            code = asyncio.run(self._post(change.to_bytes()))
        except TimeoutError:
            return f"no answer within {self.policy.timeout_s:g} s", True
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__, True
        return ("", False) if httpx.codes.is_success(code) else (f"HTTP {code}", is_retryable(code))

    async def _post(self, body: bytes) -> int:
        """The code of the answer, whose body, which may have no end, is not read."""
        headers = {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self.policy.timeout_s),
            self._client() as client,
            client.stream("POST", self.url, content=body, headers=headers, timeout=None) as answer,
        ):
            return answer.status_code

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self.transport)


@dataclass(frozen=True, slots=True)
class LineRunner:
    """Runs a line for sh for each change, as a hook."""

    fleet: Fleet
    line: str
    timeout_s: float = 60.0

    def __call__(self, change: HostChange) -> None:
        """Raises FleetError if it fails."""
        environment = variables(self.fleet, change)
        if failure := run_line(self.fleet, "watch", self.line, environment, timeout_s=self.timeout_s):
            raise FleetError(f"the command for {change.host} failed: {failure.message}")


def variables(fleet: Fleet, change: HostChange) -> dict[str, str]:
    """The environment variables of the command."""
    return {
        "DISAGG_HOOK": "watch",
        "DISAGG_FLEET": fleet.name,
        "DISAGG_CONFIG": str(fleet.path),
        "DISAGG_HOST": change.host,
        "DISAGG_CHANGE": change.change,
        "DISAGG_STATE": change.state,
        "DISAGG_ERROR": change.why,
    }


class Notifier:
    """Delivers changes one after the other, each by all of `deliver`. report: called with why one was not delivered."""

    def __init__(self, deliver: Sequence[Callable[[HostChange], None]], report: Callable[[str], None]) -> None:
        self._deliver, self._report = deliver, report
        self._waiting: Queue[HostChange] = Queue(MAX_WAITING)
        self._stopped = Event()
        self._thread = Thread(target=self._work, name="notifier", daemon=True)

    def __enter__(self) -> Notifier:
        if self._deliver:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()  # what still waits is not delivered: whoever ends the watch is there
        if self._deliver:
            self._thread.join(_END_S)

    def send(self, change: HostChange) -> None:
        """Deliver this change soon. Without room for it, it is reported and left out."""
        if not self._deliver:
            return
        try:
            self._waiting.put_nowait(change)
        except Full:
            self._report(f"{MAX_WAITING} changes wait for their delivery: that of {change.host} is left out")

    def _work(self) -> None:
        """Deliver changes until stopped: an interruption ends the wait, a pause or the command at hand."""
        with interrupted_by(self._stopped), suppress(Cancelled):
            while not self._stopped.is_set():
                try:
                    change = self._waiting.get(timeout=_POLL_S)
                except Empty:
                    continue
                for deliver in self._deliver:
                    self._deliver_by(deliver, change)

    def _deliver_by(self, deliver: Callable[[HostChange], None], change: HostChange) -> None:
        try:
            deliver(change)
        except Cancelled:
            raise
        except DisaggError as error:
            self._report(error.message)
        except Exception as error:  # noqa: BLE001  # later changes are delivered; its text may have the URL, a secret
            self._report(f"the change of {change.host} was not delivered: {type(error).__name__}")
