"""Structured logs: one JSON object per line on stderr, with the id of the request that is being served."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Any

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
log = logging.getLogger("disagg")


def event(level: int, name: str, **fields: Any) -> None:
    """Log one event. Field values must be plain JSON values and never secrets."""
    log.log(level, name, extra={"fields": fields})


def info(name: str, **fields: Any) -> None:
    """Log one event at level info."""
    event(logging.INFO, name, **fields)


def configure() -> None:
    """Send every logger of this process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for noisy in ("httpx", "httpcore", "uvicorn.error", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # asyncio warns of each write to a caller that has just disconnected, which is normal here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


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
