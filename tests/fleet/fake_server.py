"""A tiny server that stands in for disagg's in tests of the fleet: no model, no framework. It answers requests as a
prefill host does for a request of its own, and drains on SIGTERM.

    python fake_server.py HOST MODEL ADDRESS PORT BEHAVIOUR

BEHAVIOUR: serve | slow (loads forever) | crash (logs an error, exits 1) | die (exits 1 with plain words) |
broken (answers with status error) | stalled | stubborn (ignores SIGTERM) | mute (listens, never answers) |
older (another version) | early (reads its token once) | wrong (generates other tokens).

Standard library and disagg.tls only: tests start it some hundred times, and the imports of uvicorn take half a second
of CPU time.
"""

import hashlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any

from disagg.tls.certificate import ServerTLS

host, model, address, port, behaviour = sys.argv[1:6]
began = time.monotonic()
token_file = Path(os.environ["DISAGG_TOKEN_FILE"])
first_tokens = token_file.read_text().split()


def tokens() -> list[str]:
    """Those of the file now; if it is gone, those that it had at first."""
    keeps = behaviour == "early" or not token_file.exists()
    return first_tokens if keeps else token_file.read_text().split()


TLS = ServerTLS(tokens)
FIRST = 500 if behaviour == "wrong" else 100
"""The first token of every answer."""
work: dict[str, Any] = {"draining": False, "active": 0}
changed = threading.Condition()
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
    "release": os.environ.get("DISAGG_RELEASE"),
    "pending": None,
    "tokens": [],
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
    "verified": True,
    "evidence": {"prompt": "", "tokens": 0, "likeliest": []},
    "boot_id": f"boot-{os.getpid()}",
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
        "audited_tokens": 0,
        "refuted": 0,
    },
    "audit_every": 0,
    "layers": None,
    "split_refusal": "",
    "model_layers": 3,
    "senders": {"dgx": {"accepted": 7, "refuted": 1, "verdict": "accepted", "deviation": 0.01, "highest": 0.02}},
    "models": [],
    "budget_bytes": 0,
    "used_bytes": 0,
}


def digests() -> list[str]:
    return [hashlib.sha256(f"{token}\n".encode()).hexdigest()[:8] for token in tokens()]


def accepted(given: str) -> bool:
    return given in [f"Bearer {token}" for token in tokens()]


def answer(path: str, authorised: bool) -> tuple[int, dict[str, Any]]:
    """Status code and body."""
    if path not in ("/health", "/status", "/load"):
        return 404, {"error": {"code": "NotFound", "message": "no such path", "hint": ""}}
    if not authorised and path == "/health":
        return 200, {"status": status}
    if not authorised:
        return 401, {"error": {"code": "Unauthorized", "message": "wrong token", "hint": ""}}
    body = {**health_body, **(load_body if path == "/status" else {})}
    now = {"status": "draining"} if work["draining"] else {}
    return 503 if now else 200, {**body, **now, "tokens": digests(), "uptime_s": time.monotonic() - began}


class Handler(socketserver.StreamRequestHandler):
    """One request per connection."""

    timeout = 60

    def handle(self) -> None:
        words = self.rfile.readline().split()
        headers = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip().decode()
        if len(words) != 3:  # a connection that was closed before its request
            return
        authorised = accepted(headers.get(b"authorization", ""))
        if words[0] == b"POST" and authorised:
            self.generate(json.loads(self.rfile.read(int(headers.get(b"content-length", "0")))))
        else:
            self.reply(*answer(words[1].decode(), authorised))

    def reply(self, code: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {code} -\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        self.wfile.write(f"{head}Connection: close\r\n\r\n".encode() + content)

    def generate(self, body: dict[str, Any]) -> None:
        with changed:
            refused = work["draining"]
            work["active"] += not refused
        if refused:
            self.reply(503, {"error": {"code": "Overloaded", "message": f"{host} is draining", "hint": ""}})
            return
        try:
            self.stream(int(body["sampling"]["max_tokens"]), len(body.get("answer_tokens", ())))
        finally:
            with changed:
                work["active"] -= 1
                changed.notify_all()

    def stream(self, count: int, begin: int) -> None:
        self.wfile.write(b"HTTP/1.1 200 -\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for number in range(begin, count):
            token = {"id": FIRST + number, "logprob": -0.1, "top": [[FIRST + number, -0.1]]}
            self.event("tokens", {"text": f"{FIRST + number} ", "tokens": [token]})
            time.sleep(0.02)
        done = {"finish_reason": "length", "prompt_tokens": 3, "completion_tokens": count}
        self.event("done", {**done, "computed_prompt_tokens": 3, "timing": {"tokenise_s": 0.0}})

    def event(self, name: str, data: dict[str, Any]) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def get_request(self) -> tuple[Any, Any]:
        plain, caller = super().get_request()
        return TLS.context().wrap_socket(plain, server_side=True, do_handshake_on_connect=False), caller

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # else the client has gone
            super().handle_error(request, client_address)


def drain() -> None:
    """Refuse new requests, and end once those that run have their answers."""
    with changed:
        work["draining"] = True
        changed.wait_for(lambda: work["active"] == 0)
    os._exit(0)


def main() -> None:
    if behaviour == "crash":
        error = {"code": "ModelError", "message": "no weights in /models/x", "hint": "fetch them"}
        entry = {"level": "error", "event": "start_failed", **error}
        sys.stderr.write(json.dumps(entry) + "\n")
        sys.exit(1)
    if behaviour == "die":
        sys.exit("Segmentation fault, as it were")
    if behaviour == "mute":
        with socket.create_server((address, int(port))):
            signal.pause()
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
    with Server((address, int(port)), Handler) as server:
        server.serve_forever()


main()
