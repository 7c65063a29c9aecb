"""The requests that a server computes and has computed, noted down in a file that outlives its process.

A server that starts again finds there what it computed when its process ended, and each of these gets a strike; see
disagg/strikes.py. The file has marks and times, no text: first the strikes, then the places of what is computed, then
what was computed lately, in a ring. Its entries are written one by one, without a wait for the disk: what is written
stays if the process ends, and a machine that loses its power was not ended by a request.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Final, NamedTuple

from disagg import logs
from disagg.api.names import LOG_FILE_VARIABLE
from disagg.api.requests import MAX_DEADLINE_S, PromptBody
from disagg.config import Fleet, Host, slug
from disagg.servers.host.request import Phase
from disagg.strikes import MARK_BYTES, POLICY, Marks, StrikePolicy, Strikes, marks, require_innocent
from disagg.token import Tokens, token_path

COMPUTING: Final[frozenset[Phase]] = frozenset({"tokenising", "computing the prompt", "generating"})
"""Phases in which this process works on a request."""
PLACES: Final = 4096
MARKS: Final = 2  # of one request
_ENTRY: Final = struct.Struct(f"<d{MARK_BYTES}s")  # a time, negative of a suspect that was computed, and a mark
_FREE: Final = _ENTRY.pack(0.0, b"")


def record_path(fleet: Fleet, host: Host) -> Path:
    """Beside the server's log; beside the fleet's token if it has none."""
    log = os.environ.get(LOG_FILE_VARIABLE)
    return (Path(log) if log else token_path(fleet)).parent / f"{slug(host.name)}-{host.port}.requests"


class StatedVerdicts(NamedTuple):
    strikes: Mapping[str, int]
    acquitted: Sequence[str]


class RequestRecord:
    """The record of one server, and the strikes that its earlier ones gave. Without a path nothing is noted down."""

    def __init__(self, name: str, path: Path | None = None, tokens: Tokens | None = None, places: int = PLACES) -> None:
        """name: of the host. tokens: the fleet's, under which marks are made. places: requests that are noted down at a
        time; with more, the last ones are not. A file that cannot be used is logged."""
        self._name = name
        self._tokens = tokens or Tokens("")
        self._policy: StrikePolicy = POLICY
        self._places = places
        self.strikes = Strikes(self._policy)
        self._file: int | None = None
        self._written = 0  # entries of what was computed
        self._free = list(range(places - 1, -1, -1))
        if path is not None:
            try:
                self._open(path)
            except OSError as error:
                logs.event(logging.WARNING, "requests_not_recorded", path=str(path), reason=str(error))
                if self._file is not None:
                    os.close(self._file)
                    self._file = None

    def admit(self, body: PromptBody) -> RecordedRequest:
        """A request arrives. Raises RequestEndedHosts if it has too many strikes here."""
        of = marks(body, self._tokens.current)
        if self.strikes.ended.all and body.standing != "innocent":
            require_innocent(of, [self.verdicts], self._policy, self._name)
        return RecordedRequest(self, of, suspect=body.standing != "")

    @property
    def verdicts(self) -> StatedVerdicts:
        """What GET /load states of requests that end hosts."""
        now = time.time()
        return StatedVerdicts(self.strikes.stated(now), self.strikes.acquitted(now))

    def close(self) -> None:
        """The server ends of its own will: nothing that it computes ends it."""
        file, self._file = self._file, None  # first: engines' threads write, too
        if file is not None:
            with suppress(OSError):  # the file has gone, or its disk has
                os.pwrite(file, _FREE * (MARKS * self._places), _ENTRY.size * self._first_place)
            os.close(file)

    def note(self, of: Marks) -> int | None:
        """Note down that the request is computed. Returns its place."""
        try:
            place, now = self._free.pop(), time.time()
        except IndexError:
            return None
        entries = [_ENTRY.pack(now, bytes.fromhex(mark)) for mark in of.computed[:MARKS]]
        self._write(self._first_place + MARKS * place, b"".join(entries))
        return place

    def drop(self, place: int) -> None:
        """The request of this place is not computed any more."""
        self._write(self._first_place + MARKS * place, _FREE * MARKS)
        self._free.append(place)

    def computed(self, of: Marks, *, suspect: bool) -> None:
        """The request was computed."""
        now = time.time()
        self.strikes.computed(of.computed, now, suspect=suspect)
        for mark in of.computed:
            entry = _ENTRY.pack(-now if suspect else now, bytes.fromhex(mark))
            self._write(self._first_computed + self._written % self._policy.computed, entry)
            self._written += 1

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        entries = self._first_computed + self._policy.computed
        data = os.pread(self._file, _ENTRY.size * entries, 0)
        found = [_ENTRY.unpack_from(data, at) for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size)]
        now = time.time()
        # Older ones are of a full disk, on which a place could not be freed: no request lasts longer.
        places = found[self._first_place : self._first_computed]
        running = {mark.hex() for at, mark in places if 0 <= now - at < MAX_DEADLINE_S}
        written = [(at, mark) for at, mark in found[self._first_computed :] if at and isfinite(at)]
        written.sort(key=lambda one: abs(one[0]))
        self.strikes = Strikes(
            self._policy,
            [(mark.hex(), at) for at, mark in found[: self._first_place] if at and isfinite(at)],
            [(mark.hex(), abs(at)) for at, mark in written],
            [(mark.hex(), -at) for at, mark in written if at < 0],
        )
        self.strikes.add(sorted(running), now)
        ended = [_ENTRY.pack(at, bytes.fromhex(mark)) for mark, at in self.strikes.ended.all]
        self._written = len(written)
        content = [*ended, *[_FREE] * (self._first_computed - len(ended)), *(_ENTRY.pack(*one) for one in written)]
        os.pwrite(self._file, b"".join([*content, *[_FREE] * (entries - len(content))]), 0)
        if running:
            logs.event(logging.WARNING, "ended_while_computing", requests=len(running))

    @property
    def _first_place(self) -> int:
        return self._policy.kept

    @property
    def _first_computed(self) -> int:
        return self._policy.kept + MARKS * self._places

    def _write(self, entry: int, data: bytes) -> None:
        """Write from this entry of the file on."""
        if self._file is not None:
            with suppress(OSError):  # the disk is full: this request is not noted down
                os.pwrite(self._file, data, _ENTRY.size * entry)


class RecordedRequest:
    """One request in the record, from its arrival to its end. Callable from any thread: an engine begins with it on its
    own."""

    def __init__(self, running: RequestRecord, of: Marks, *, suspect: bool) -> None:
        """suspect: its caller knows of a host that has ended with it."""
        self._running, self._marks, self._suspect = running, of, suspect
        self._lock = threading.Lock()
        self._place: int | None = None
        self._over = False

    def entered(self, phase: Phase) -> None:
        """The request is in this phase."""
        with self._lock:
            if phase not in COMPUTING:
                self._drop()
            elif self._place is None and not self._over:
                self._place = self._running.note(self._marks)

    def computed(self) -> None:
        """Its prompt is computed, or its first token: what ends the process now is not known to be this request."""
        if not self._over:
            self.ended()
            self._running.computed(self._marks, suspect=self._suspect)

    def ended(self) -> None:
        """The request is not computed any more."""
        with self._lock:
            self._over = True
            self._drop()

    def _drop(self) -> None:
        if self._place is not None:
            self._running.drop(self._place)
            self._place = None
