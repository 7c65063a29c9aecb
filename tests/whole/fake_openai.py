"""A server of OpenAI's API that answers what a test tells it to, in this process."""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.config import EngineOptions, Fleet, Host
from tests.secure import in_thread

MODEL_THERE = "llama:8b"


@dataclass(slots=True)
class Script:
    """What the server answers. pieces: of each streamed answer; bytes are sent as they are. cut: close the connection
    after the last piece, without its end. asked: the requests that came, as (path, headers, body)."""

    pieces: Sequence[dict[str, Any] | bytes] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    cut: bool = False
    models: Sequence[str] = (MODEL_THERE,)
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def openai_server(script: Script) -> Iterator[int]:
    """The port of the server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client has had enough
                super().handle()

        def do_GET(self) -> None:
            self._asked({})
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in script.models]}
            self._whole(200, {"Content-Type": "application/json"}, json.dumps(listed).encode())

        def do_POST(self) -> None:
            self._asked(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if script.status != 200 or script.content:
                self._whole(script.status, script.headers, script.content)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in script.pieces:
                data = piece if isinstance(piece, bytes) else f"data: {json.dumps(piece)}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            if script.cut:
                self.close_connection = True
                return
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

        def _asked(self, body: dict[str, Any]) -> None:
            script.asked.append((self.path, dict(self.headers), body))

        def _whole(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True  # idle connections of a client end with it

    with in_thread(Server(("127.0.0.1", 0), Handler)) as port:
        yield port


def whole_host(model: str, port: int, path: str = "/v1", **options: Any) -> Host:
    """The server as a host of this model."""
    engine = EngineOptions("openai", url=f"http://127.0.0.1:{port}{path}", model=MODEL_THERE, **options)
    return Host("ollama", "127.0.0.1", ("whole",), model, engine, port)


def with_whole(fleet: Fleet, host: Host, *, alone: bool = False) -> Fleet:
    """The fleet with this host beside its own, or instead of them."""
    return replace(fleet, hosts={**({} if alone else fleet.hosts), host.name: host})


def said(text: str, **more: Any) -> dict[str, Any]:
    """A piece of a chat's answer."""
    return {"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": None}]}


def ended(reason: str = "stop", prompt: int = 7, answer: int = 3) -> list[dict[str, Any]]:
    """The last pieces of a chat's answer."""
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}]
