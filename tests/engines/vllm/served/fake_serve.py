"""A server that answers as a `vllm serve` does, as far as a test says what."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from disagg.api.delivery import ConnectorInfo
from disagg.version import VERSION
from tests.kv.kv_parts import FINGERPRINT, mixed_layout
from tests.secure import in_thread

INFO: Final = ConnectorInfo(
    version=VERSION,
    vllm="0.32.0",
    torch="2.13.0",
    device="cpu",
    context=64,
    ranks=1,
    layout=json.loads(json.dumps(mixed_layout().to_json())),
    fingerprint=FINGERPRINT.to_json(),
    kv_bytes=1 << 20,
)


class FakeServe:
    """answer: to a body of POST /v1/completions, as (status, content); of several lines if it is streamed. It may
    wait. asked: set at the first body. healthy: the status of GET /health. keys: those of requests, by their paths."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> None:
        self.answer = answer
        self.models = b'{"data": [{"id": "tiny"}]}'
        self.healthy = 200
        self.bodies: list[dict[str, Any]] = []
        self.keys: dict[str, str | None] = {}
        self.asked = threading.Event()
        self.url = ""


@contextmanager
def serving(answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> Iterator[FakeServe]:
    """A FakeServe on a free port."""
    fake = FakeServe(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            fake.keys[self.path] = self.headers["Authorization"]
            self._reply(fake.healthy if self.path == "/health" else 200, fake.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            fake.keys[self.path] = self.headers["Authorization"]
            fake.asked.set()
            self._reply(*fake.answer(body))

        def _reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):  # the caller has gone
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with in_thread(server) as port:
        fake.url = f"http://127.0.0.1:{port}"
        yield fake


def completed(connector: Any, reason: str = "length") -> bytes:
    """The answer to a prompt. connector: what it says in kv_transfer_params; None without one. reason: for its end."""
    choice = {"finish_reason": reason}
    return json.dumps({"choices": [choice], "kv_transfer_params": connector and {"disagg": connector}}).encode()
