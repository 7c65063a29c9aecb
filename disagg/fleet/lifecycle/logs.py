"""The servers' logs of all hosts, merged by time: `read` what is there, or `follow` what is being written.

Lines are JSON with "time"; any other line, such as a traceback, stays after the line before it. At most the requested
number of lines per host is held in memory. Following continues through a server's restart, a log's rotation and a
lost connection.
"""

from __future__ import annotations

import heapq
import shlex
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from queue import Empty, Full, Queue
from typing import Any, Final

from disagg.config import Host, slug
from disagg.errors import Cancelled, DisaggError, FleetError
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.lifecycle.loglines import entry
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine import interruption
from disagg.fleet.machine.connect import Connect, machine_for
from disagg.fleet.machine.fan_out import each, in_background
from disagg.fleet.machine.machine import last_lines, script

_NONE: Final = 66
_READ_S: Final = 60.0
_QUEUED: Final = 10_000
_TOGETHER_S: Final = 0.3
"""Lines that arrive within this time are sorted."""
_FIRST_S: Final = 2.0
"""How long the first lines wait for hosts that are still connecting."""
_RETRY_S: Final = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. time: seconds since 1970, its own or that of the last line that has one. fields: its JSON object, None
    if it is not one. notice: a message about the log, not a line of it."""

    host: str
    time: float
    text: str
    fields: dict[str, Any] | None = field(default=None, compare=False)
    notice: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "time": self.time, "text": self.text, "fields": self.fields}


class _Clock:
    """Assigns times to the lines of one host that never decrease."""

    def __init__(self, host: str) -> None:
        self._host, self._time = host, 0.0

    def line(self, text: str) -> LogLine:
        fields = entry(text)
        if fields is not None and (stamp := _seconds(fields.get("time"))) is not None:
            self._time = max(self._time, stamp)
        return LogLine(self._host, self._time, text, fields)


def read(
    hosts: Sequence[Host],
    state: State,
    lines: int,
    since: float | None = None,
    connect: Connect = machine_for,
    *,
    audits: bool = False,
) -> tuple[list[LogLine], list[DisaggError]]:
    """The last lines of all hosts in order of time, and the errors of hosts whose log cannot be read. At most `lines`
    of each host, and none older than `since` (seconds since 1970). audits: those of the hosts' audits; a host that no
    command has changed yet has none."""

    def fetch(host: Host) -> list[LogLine]:
        clock, kept = _Clock(host.name), deque[LogLine](maxlen=lines)

        def take(text: str) -> None:
            line = clock.line(text)
            if since is None or line.time >= since:
                kept.append(line)

        machine = connect(host)
        try:
            text = script("path.sh", "log_read.sh")
            result = machine.run([_path(host, state, audits), str(lines)], script=text, timeout=_READ_S, on_line=take)
        finally:
            machine.close()
        if result.code == _NONE and not audits:
            load = f"disagg models load {shlex.quote(host.model)} --host {host.keeper}"
            hint = load if host.keeper else f"disagg start --host {host.name}"
            raise FleetError(f"{host.name} has no log yet", hint)
        if not result.ok and result.code != _NONE:
            raise FleetError(f"{host.name}: its log cannot be read: {last_lines(result.stderr, 3)}")
        return list(kept)

    outcomes = each(hosts, fetch)
    merged = heapq.merge(*(outcome.value or [] for outcome in outcomes), key=lambda line: line.time)
    return list(merged), [outcome.error for outcome in outcomes if outcome.error is not None]


def follow(
    hosts: Sequence[Host], state: State, lines: int, since: float | None = None, connect: Connect = machine_for
) -> Generator[LogLine, None, None]:
    """The last lines of every host, then each new one as it is written, until the iterator is closed."""
    arrived: Queue[LogLine] = Queue(_QUEUED)

    def follow_host(host: Host) -> None:
        _Follower(host, state, lines, since, connect, arrived).run()

    with in_background(hosts, follow_host):
        yield from _in_order(arrived, {host.name for host in hosts})


def _in_order(arrived: Queue[LogLine], silent: set[str]) -> Iterator[LogLine]:
    """Lines in short batches, each in order of time. The first batch waits for a line of every host, or _FIRST_S."""
    first = time.monotonic() + _FIRST_S
    batch: list[LogLine] = []
    due = first
    while True:
        line: LogLine | None
        try:
            line = arrived.get(timeout=max(0.01, due - time.monotonic()) if batch else 0.5)
        except Empty:
            line = None
        if line is not None:
            silent.discard(line.host)
            if not batch:
                due = max(time.monotonic() + _TOGETHER_S, first if silent else 0.0)
            elif not silent:
                due = min(due, time.monotonic() + _TOGETHER_S)
            batch.append(line)
        if batch and (time.monotonic() >= due or len(batch) >= _QUEUED):
            yield from sorted(batch, key=lambda one: one.time)
            batch, first = [], 0.0


@dataclass(slots=True)
class _Follower:
    """Follows one host's log, reconnecting as often as needed."""

    host: Host
    state: State
    lines: int
    since: float | None
    connect: Connect
    arrived: Queue[LogLine]
    _last: float = 0.0
    _at_last: set[str] = field(default_factory=set)
    _again: bool = False

    def run(self) -> None:
        """Follow until interrupted, which raises Cancelled."""
        tries = 0
        while True:
            began = time.monotonic()
            why = self._follow()
            tries = 0 if time.monotonic() - began > 10 else tries
            self._put(LogLine(self.host.name, self._last, why, notice=True))
            interruption.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
            tries, self._again = tries + 1, True
            self.lines = _QUEUED  # more than the requested lines may have been written while the link was down

    def _follow(self) -> str:
        """Pass lines on until the connection or the log ends; returns why."""
        clock = _Clock(self.host.name)
        machine = self.connect(self.host)

        def follow(wait: str) -> int:
            argv = [_path(self.host, self.state), str(self.lines), wait]
            text = script("path.sh", "log_follow.sh")
            return machine.run(
                argv, script=text, timeout=float("inf"), on_line=lambda line: self._take(clock.line(line))
            ).code

        try:
            if follow("wait" if self._again else "") == _NONE:
                self._put(LogLine(self.host.name, self._last, "it has no log yet; waiting for one", notice=True))
                follow("wait")
            return "its log is no longer followed; trying again"
        except Cancelled:
            raise
        except DisaggError as error:
            return f"{error.message}; trying again"
        finally:
            machine.close()

    def _take(self, line: LogLine) -> None:
        if self.since is not None and line.time < self.since:
            return
        if self._again and (line.time < self._last or (line.time == self._last and line.text in self._at_last)):
            return  # passed on before the connection was lost
        if line.time > self._last:
            self._last = line.time
            self._at_last.clear()
        if len(self._at_last) < _QUEUED:
            self._at_last.add(line.text)
        self._put(line)

    def _put(self, line: LogLine) -> None:
        while True:
            interruption.check()
            try:
                self.arrived.put(line, timeout=interruption.POLL_S)
                return
            except Full:
                continue


def _path(host: Host, state: State, audit: bool = False) -> str:
    if host.keeper:
        log = HostPaths("~", host.keeper).model_log(slug(host.model))
        return str(state.model_log(host)) if host.server_kind.spawned else log
    if host.server_kind.spawned:
        return str(state.audit_file(host.name) if audit else state.log_file(host.name))
    there = HostPaths("~", host.name)
    return there.audit if audit else there.server_log


def _seconds(stamp: Any) -> float | None:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError):
        return None
