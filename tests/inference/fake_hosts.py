"""Hosts that misbehave on purpose, in front of real ones."""

from __future__ import annotations

import dataclasses
import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import httpx

from disagg.config import Fleet, Host
from disagg.inference.client import Client
from disagg.inference.policy import RetryPolicy, Timeouts
from tests.fleets import RunningFleet
from tests.secure import SecureHTTPServer, in_thread

End = Literal["cut", "error"]
OVERLOADED = b'{"error": {"code": "Overloaded", "message": "the queue is full", "hint": ""}}'
ENGINE_ERROR = b'event: error\ndata: {"code": "ModelError", "message": "out of memory", "hint": ""}\n\n'


@contextmanager
def breaking_off(real: Host, after: int, end: End) -> Iterator[int]:
    """The port of a server that passes requests on to `real`, and after so many tokens (or a few more, as
    steps may arrive in one event) closes the connection or sends an error of the engine. GET /load answers as the real
    host."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = httpx.get(real.url + self.path, headers=self._headers(), timeout=60, trust_env=False, verify=False)
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            url = real.url + self.path
            with httpx.stream(
                "POST", url, content=body, headers=self._headers(), timeout=60, trust_env=False, verify=False
            ) as answer:
                self.send_response(answer.status_code)
                self.end_headers()
                left, event = after, ""
                for line in answer.iter_lines():
                    if left <= 0 and not line:
                        break
                    event = line.removeprefix("event: ") if line.startswith("event: ") else event
                    if event == "tokens" and line.startswith("data: "):
                        left -= len(json.loads(line.removeprefix("data: "))["tokens"])
                    self.wfile.write(f"{line}\n".encode())
            self.wfile.write(b"\n")
            if end == "error":
                self.wfile.write(ENGINE_ERROR)
            self.close_connection = True

        def _headers(self) -> dict[str, str]:
            return {name: self.headers[name] for name in ("Authorization", "X-Request-Id") if name in self.headers}

        def log_message(self, *_: object) -> None: ...

    with in_thread(SecureHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield port


@contextmanager
def misbehaving(kind: str, real: Host) -> Iterator[int]:
    """The port of a server that fails in one way: "overloaded", "foreign", "forgetful" (does what it is
    asked, through `real`, and drops the answer) or "half" (opens a stream and closes it)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if kind == "forgetful":
                headers = {name: self.headers[name] for name in ("Authorization", "X-Request-Id")}
                with httpx.Client(headers=headers, timeout=60, trust_env=False, verify=False) as plain:
                    plain.post(real.url + self.path, content=body)
            elif kind == "half":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'event: slot\ndata: {"kv": {}, "ticket": "x"}\n\n')
            else:
                self.send_response(503)
                self.end_headers()
                self.wfile.write(OVERLOADED if kind == "overloaded" else b'{"error": "not found"}')
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    with in_thread(SecureHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield port


def with_first(fleet: Fleet, like: str, port: int) -> Fleet:
    """The fleet with one more host, tried before the others, that is like `like` but on another port."""
    bad = dataclasses.replace(fleet.hosts[like], name=f"bad-{like}", port=port)
    return dataclasses.replace(fleet, hosts={bad.name: bad, **fleet.hosts})


def only(running: RunningFleet, *hosts: Host) -> Fleet:
    """The fleet with these hosts instead of its own."""
    return dataclasses.replace(running.fleet, hosts={host.name: host for host in hosts})


PATIENT = RetryPolicy(timeouts=Timeouts(silence=60.0, stall=60.0, note=60.0, slow_transfer=60.0))
"""No host is given up for being slow: this machine may be."""


def ask_nothing(client: Client) -> None:
    """Let no host be given up for a slow answer about its load."""

    async def ask(host: Host) -> None: ...

    client._driver.refresher._ask = ask  # type: ignore[method-assign]  # answers without a host
