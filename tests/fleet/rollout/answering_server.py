"""A tiny server that answers requests as a prefill host does for a request of its own, and drains on SIGTERM.

    python answering_server.py HOST MODEL ADDRESS PORT BEHAVIOUR

BEHAVIOUR: serve | wrong (other tokens) | crash (exits 1). Standard library and disagg.tls only, because tests start it
often.
"""

import json
import os
import signal
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any

from disagg.tls.certificate import ServerTLS

host, model, address, port, behaviour = sys.argv[1:6]
tokens = Path(os.environ["DISAGG_TOKEN_FILE"]).read_text().split()
TLS = ServerTLS(lambda: tokens)
running: dict[str, Any] = {"status": "ok", "active": 0}
changed = threading.Condition()
FIRST = 500 if behaviour == "wrong" else 100
TIMING = {"tokenise_s": 0.0}


def report() -> dict[str, Any]:
    fingerprint = dict.fromkeys(("architecture", "rope", "tokenizer", "chat_template", "special_tokens"), "x")
    return {
        "status": running["status"],
        "host": host,
        "model": model,
        "loaded": True,
        "backend": "fake/cpu",
        "role": "prefill",
        "simulated": False,
        "code": "",
        "config": "",
        "release": os.environ.get("DISAGG_RELEASE"),
        "pending": None,
        "version": "0.1.0",
        "versions": {},
        "fingerprint": {**fingerprint, "vocab_size": 1000},
        "preflight": [],
        "boot_id": f"boot-{os.getpid()}",
        "pid": os.getpid(),
        "uptime_s": 1.0,
    }


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
        body = self.rfile.read(int(headers.get(b"content-length", "0")))
        if headers.get(b"authorization") not in [f"Bearer {token}" for token in tokens]:
            self.reply(401, {"error": {"code": "Unauthorized", "message": "wrong token", "hint": ""}})
        elif words[0] == b"POST":
            self.generate(json.loads(body))
        else:
            self.reply(200 if running["status"] == "ok" else 503, report())

    def reply(self, code: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {code} -\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        self.wfile.write(f"{head}Connection: close\r\n\r\n".encode() + content)

    def generate(self, body: dict[str, Any]) -> None:
        with changed:
            refused = running["status"] != "ok"
            running["active"] += not refused
        if refused:
            self.reply(503, {"error": {"code": "Overloaded", "message": f"{host} is draining", "hint": ""}})
            return
        try:
            self.answer(int(body["sampling"]["max_tokens"]), len(body.get("answer_tokens", ())))
        finally:
            with changed:
                running["active"] -= 1
                changed.notify_all()

    def answer(self, count: int, begin: int) -> None:
        self.wfile.write(b"HTTP/1.1 200 -\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for number in range(begin, count):
            token = {"id": FIRST + number, "logprob": -0.1, "top": [[FIRST + number, -0.1]]}
            self.event("tokens", {"text": f"{FIRST + number} ", "tokens": [token]})
            time.sleep(0.02)
        done = {"finish_reason": "length", "prompt_tokens": 3, "completion_tokens": count}
        self.event("done", {**done, "computed_prompt_tokens": 3, "timing": TIMING})

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
        running["status"] = "draining"
        changed.wait_for(lambda: running["active"] == 0)
    os._exit(0)


def main() -> None:
    if behaviour == "crash":
        sys.exit("no such kernel")
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
    with Server((address, int(port)), Handler) as server:
        server.serve_forever()


main()
