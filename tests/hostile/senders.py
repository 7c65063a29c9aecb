"""Prefill hosts that open a KV connection as they should and then send next to nothing, in one way each.

A new way is one line of WAYS. `python -m tests.hostile.senders` prints how long answers take beside a good host.
"""

from __future__ import annotations

import argparse
import http.server
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx

from disagg.api.events import ProgressEvent
from disagg.engines.model.reference import Reference
from disagg.inference.client import Client
from disagg.kv import frames
from disagg.kv.fingerprint import token_hash
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, running, write_hosts
from tests.inference.fake_hosts import with_first
from tests.kv.kv_parts import introduce, opened
from tests.secure import SecureHTTPServer, in_thread

PROGRESS_S: Final = 0.5
IDLE_S: Final = 0.25
PROMPT: Final = tuple(10 + n * 37 % 600 for n in range(8000))
TOKENS: Final = 1500

Way = Callable[[int, int], Iterator[tuple[bytes, float]]]
"""What is sent after the header of KV of so many tokens, with so many bytes of keys in layer 0: bytes, and the seconds
until the next ones."""


def _idle(beats: Iterator[int]) -> Iterator[tuple[bytes, float]]:
    for beat in beats:
        yield frames.encode_idle(beat), IDLE_S


def _bytes_of_a_frame(size: int, seconds: float, tokens: int, nbytes: int) -> Iterator[tuple[bytes, float]]:
    """The first rows of layer 0's keys, which are never complete."""
    yield frames.encode_frame(frames.Frame(frames.Kind.KEYS, 0, 0, 0, tokens, nbytes)), 0.0
    while True:
        yield bytes(size), seconds


WAYS: Final[Mapping[str, Way]] = {
    "idle frames for ever": lambda tokens, nbytes: _idle(iter(lambda: 7, None)),
    "idle frames of an engine that states no progress": lambda tokens, nbytes: _idle(iter(lambda: 0, None)),
    "one byte a second": partial(_bytes_of_a_frame, 1, 1.0),
    "a hundred bytes a second": partial(_bytes_of_a_frame, 10, 0.1),
}
BUSY: Final[Mapping[str, Way]] = {"idle frames of an engine that claims to work": lambda tokens, nbytes: _idle(count())}
"""These are believed for longer: an engine may work for other prompts."""


@contextmanager
def lying_prefill(fleet: RunningFleet, name: str, way: Way) -> Iterator[int]:
    """The port of a prefill host that sends KV in this way; in all else it answers as the host `name` does. For prompts
    given as tokens, of which nothing is held."""
    real = fleet.fleet.hosts[name]
    source = Path(fleet.fleet.models[real.model].sources[real.engine.name])
    reference = Reference.open(source, fleet.fleet.models[real.model].context)
    layout, fingerprint = reference.layout(real.engine.dtype), reference.fingerprint
    row_bytes = layout.layers[0].kv_heads * layout.layers[0].key_dim * layout.itemsize

    def send(body: dict[str, Any], request_id: str) -> None:
        count = len(body["tokens"]) - 1
        digest = token_hash(body["tokens"])
        header = frames.Header(body["ticket"], request_id, fingerprint, layout, digest, count, body.get("start", 0))
        with (
            suppress(OSError),
            socket.create_connection((body["deliver"]["host"], body["deliver"]["port"])) as sock,
        ):
            introduce(sock, body["ticket"], opened(header))
            for piece, seconds in way(count, count * row_bytes):
                sock.sendall(piece)
                time.sleep(seconds)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {"Authorization": self.headers.get("Authorization", "")}
            answer = httpx.get(real.url + self.path, headers=headers, timeout=60, trust_env=False, verify=False)
            self._reply(answer.content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/prefill":
                return self._reply(b"{}")
            sending = threading.Thread(target=send, args=(body, self.headers["X-Request-Id"]), daemon=True)
            sending.start()
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for beats in count():
                    event = ProgressEvent(phase="computing the prompt", beats=beats)
                    self.wfile.write(b"event: progress\ndata: %b\n\n" % event.to_bytes())
                    self.wfile.flush()
                    time.sleep(PROGRESS_S)
            return None

        def _reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = SecureHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    with in_thread(server) as port:
        yield port


@contextmanager
def client_of_liar(fleet: RunningFleet, name: str, way: Way) -> Iterator[Client]:
    """A client that asks the lying host before the host `name`, which is good."""
    with (
        lying_prefill(fleet, name, way) as port,
        Client(with_first(fleet.fleet, name, port), token=TOKEN, start=0) as client,
    ):
        yield client


def main() -> int:
    """Print the seconds of an answer with good hosts alone, and with each liar asked first."""
    from tests import tiny_models

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    prompt = PROMPT[: options.parse_args().tokens]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make("qwen3", Path(folder) / "model")
        path = write_hosts(Path(folder), {"tiny": model}, context=8192)
        with running(path) as fleet:
            with fleet.client() as client:  # a host states its speed once it has computed
                _seconds(client, [19, *prompt[1:]])
            first = count(20)  # each prompt is new: nothing of it is held
            for name, way in {"good hosts alone": None, **WAYS, **BUSY}.items():
                times = []
                for _ in range(5):
                    with fleet.client() if way is None else client_of_liar(fleet, "tiny-prefill", way) as client:
                        client.generate("tiny", tokens=[next(first)], max_tokens=1)
                        wait_until(lambda: _knows_the_speed(client), 10, "the client to know how fast the host is")
                        times.append(_seconds(client, [next(first), *prompt[1:]]))
                sys.stdout.write(f"{name:50} {statistics.median(times):6.2f} s (longest {max(times):.2f})\n")
    return 0


def _knows_the_speed(client: Client) -> bool:
    load = client.view.of("tiny-prefill").load
    return load is not None and load.prefill_tokens_s is not None


def _seconds(client: Client, prompt: list[int]) -> float:
    began = time.monotonic()
    client.generate("tiny", tokens=prompt, max_tokens=64, timeout=60, local_prefill=False, split="off")
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
