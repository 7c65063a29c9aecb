"""Structured logs: one JSON object per line on stderr, with the id of the request that is being served.

A log cannot fill a disk: lines that are not a request's are limited in number, and the file is rotated by size.
"""

from __future__ import annotations

import contextvars
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.api.names import LOG_BYTES, LOG_FILE_VARIABLE

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
log = logging.getLogger("disagg")

MAX_LINES = 20
WINDOW_S = 10.0
"""At most MAX_LINES of a kind that are not a request's in this time; then one line that says how many were left out."""
RETRY_S = 60.0
"""Between two attempts to rotate, if one fails."""


def event(level: int, name: str, **fields: Any) -> None:
    """Log one event. Field values must be plain JSON values and never secrets."""
    log.log(level, name, extra={"fields": fields})


def info(name: str, **fields: Any) -> None:
    """Log one event at level info."""
    event(logging.INFO, name, **fields)


def configure() -> None:
    """Send every logger of this process to stderr as JSON lines, and the traces of a crash in native code too."""
    path = os.environ.get(LOG_FILE_VARIABLE)
    logging.basicConfig(level=logging.INFO, handlers=[Handler(LogFile(Path(path)) if path else None)], force=True)
    logging.captureWarnings(True)
    for noisy in ("httpx", "httpcore", "uvicorn.error", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # asyncio warns of each write to a caller that has just disconnected, which is normal here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    faulthandler.enable(2)
    threading.excepthook = _thread_failed


def summarise() -> None:
    """Log how many lines were left out in windows that have ended. Called now and then."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Handler):
            handler.summarise()


@dataclass(slots=True)
class _Window:
    began: float
    lines: int = 0
    left_out: int = 0


class RateLimit:
    """MAX_LINES of each kind per WINDOW_S. Pure; times are time.monotonic()."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}  # bounded by the number of log calls in the code

    def allow(self, kind: str, now: float) -> bool:
        """Whether one more line of this kind is written."""
        window = self._windows.setdefault(kind, _Window(now))
        window.lines += 1
        if window.lines > MAX_LINES:
            window.left_out += 1
        return window.lines <= MAX_LINES

    def ended(self, now: float) -> list[tuple[str, int]]:
        """Forget the windows that have ended; how many lines of which kind were left out in them."""
        over = {kind: window for kind, window in self._windows.items() if now - window.began >= WINDOW_S}
        for kind in over:
            del self._windows[kind]
        return [(kind, window.left_out) for kind, window in over.items() if window.left_out]


class Handler(logging.StreamHandler[Any]):
    """Writes JSON lines to stderr. file: what stderr is, for rotation; None if that is not known."""

    def __init__(self, file: LogFile | None) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_JsonFormatter())
        self._limit = RateLimit()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        of_a_request = request_id.get() is not None or "request_id" in fields
        if not of_a_request:
            self.summarise()  # begins new windows, in a process that never calls `logs.summarise`, too
        if of_a_request or self._limit.allow(f"{record.name}: {record.msg}", time.monotonic()):
            super().emit(record)
            if self._file is not None:
                self._file.rotate_if_full()

    def summarise(self) -> None:
        """Log how many lines were left out in windows that have ended."""
        with self.lock or threading.RLock():
            for kind, lines in self._limit.ended(time.monotonic()):
                record = log.makeRecord(log.name, logging.WARNING, "", 0, "lines_left_out", (), None)
                record.fields = {"kind": kind, "lines": lines, "seconds": WINDOW_S}
                super().emit(record)


class LogFile:
    """The file that this process writes as stdout and stderr. When it is full it becomes PATH.1, and a new one begins:
    the descriptors stay, so that native code, too, writes to the new one."""

    def __init__(self, path: Path, limit: int = LOG_BYTES, descriptors: tuple[int, ...] = (1, 2)) -> None:
        self._path = path
        self._limit = limit
        self._descriptors = descriptors
        self._not_before = 0.0

    def rotate_if_full(self) -> None:
        """Rotate a full file, unless this has just failed, e.g. on a full disk: then the same file goes on."""
        if os.fstat(self._descriptors[-1]).st_size <= self._limit or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + RETRY_S
        with suppress(OSError):
            if not os.path.samestat(os.fstat(self._descriptors[-1]), self._path.stat()):
                return  # the output of this process goes elsewhere
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            new = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            for descriptor in self._descriptors:
                os.dup2(new, descriptor)
            os.close(new)
            self._not_before = 0.0


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread else "?"
    trace = (failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    log.error("thread_failed", exc_info=trace, extra={"fields": {"thread": name}})


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
