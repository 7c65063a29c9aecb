"""A tiny server that stands in for disagg's in tests of starting, stopping and watching: no model, no framework.

    python fake_server.py HOST MODEL ADDRESS PORT BEHAVIOUR

BEHAVIOUR: serve | slow (loads forever) | crash (logs an error, exits 1) | die (exits 1 with plain words) |
broken (answers with status error) | stalled | stubborn (ignores SIGTERM) | mute (listens, never answers) |
older (another version).
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

host, model, address, port, behaviour = sys.argv[1:6]
began = time.monotonic()
token = Path(os.environ["DISAGG_TOKEN_FILE"]).read_text().strip()
status = {"slow": "loading", "broken": "error", "stalled": "stalled"}.get(behaviour, "ok")
health_body = {
    "status": status,
    "host": host,
    "model": model,
    "loaded": status == "ok",
    "backend": "fake/cpu",
    "role": "prefill",
    "simulated": False,
    "code": "",
    "config": "",
    "release": None,
    "pending": None,
    "version": "0.0.1" if behaviour == "older" else "0.1.0",
    "versions": {"fake": "1"},
    "fingerprint": {
        "architecture": "fake",
        "vocab_size": 1000,
        "rope": "r1",
        "tokenizer": "t1",
        "chat_template": "c1",
        "special_tokens": "s1",
    },
    "preflight": [],
    "boot_id": "0123456789abcdef",
    "pid": os.getpid(),
}
load_body = {
    "queue": 1,
    "running": 2,
    "kv_bytes": 3 << 20,
    "kv_held_bytes": 1 << 20,
    "memory": {"total": 128 << 30, "available": 100 << 30, "process": 2 << 30, "weights": 1 << 30},
    "device": {"name": "fake/cpu", "cpu_percent": 25.0, "utilisation": None},
    "last_error": None,
    "counters": {
        "requests": 7,
        "completed": 6,
        "cancelled": 1,
        "failed": 0,
        "prompt_tokens": 700,
        "completion_tokens": 60,
        "computed_prompt_tokens": 700,
        "kv_bytes_total": 9 << 20,
    },
}


async def health(request: Request) -> JSONResponse:
    if request.headers.get("authorization") != f"Bearer {token}":
        return JSONResponse({"status": status})
    return JSONResponse({**health_body, "uptime_s": time.monotonic() - began})


async def load(request: Request) -> JSONResponse:
    if request.headers.get("authorization") != f"Bearer {token}":
        return JSONResponse({"error": {"code": "Unauthorized", "message": "wrong token", "hint": ""}}, 401)
    return JSONResponse({**health_body, **load_body, "uptime_s": time.monotonic() - began})


def main() -> None:
    if behaviour == "crash":
        entry = {"level": "error", "code": "ModelError", "message": "no weights in /models/x", "hint": "fetch them"}
        sys.stderr.write(json.dumps(entry) + "\n")
        sys.exit(1)
    if behaviour == "die":
        sys.exit("Segmentation fault, as it were")
    if behaviour == "mute":
        with socket.create_server((address, int(port))):
            signal.pause()
    app = Starlette(routes=[Route("/health", health), Route("/status", load)])
    server = uvicorn.Server(uvicorn.Config(app, host=address, port=int(port), log_level="warning"))
    if behaviour == "stubborn":
        vars(server)["capture_signals"] = ignore_signals
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(server.serve())


class ignore_signals:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


main()
