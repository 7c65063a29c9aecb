"""What `benchmarks.per_token` runs in a checkout: a server that states what its threads have used, and a client that
reads answers of it.

    python per_token_run.py client FOLDER MODEL    MODEL: simulated or demo

The client starts the server, prints one line when that is ready, and then for each line "STREAMS TOKENS" on stdin
one JSON object. It uses nothing but hosts.toml, the command line of servers and `disagg.AsyncClient`, so that the same
file measures the code of another commit.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from disagg import AsyncClient

START_S: Final = 300.0
EDGE: Final = 20
"""Tokens of each answer before and after what is measured: requests that begin and end are not counted."""
MODEL: Final = "model"
# A model of 4 ms a step on this machine.
CONFIG: Final = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 19,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
ENGINES: Final = {
    "simulated": 'hardware = "m3-ultra"\nengine = {name = "simulated", max_batch = 32}',
    "demo": 'engine = {name = "mlx", dtype = "float32", threads = 1, max_batch = 32, max_kv_bytes = 1073741824}',
}
HOSTS: Final = """
[fleet]
name = "per-token"
[models.model]
context = 4096
sources = {{simulated = "{folder}/config.json", mlx = "package:demo/models/qwen3-moe-tiny"}}
[hosts.decode]
address = "127.0.0.1"
roles = ["decode"]
model = "model"
port = {ports[0]}
kv_port = {ports[1]}
connector = "local"
service = "process"
{engine}
"""


def main() -> None:
    if sys.argv[1] == "server":
        sys.exit(serve(sys.argv[2]))
    try:  # the loop of disagg's own programs
        from disagg.http.server import run
    except ImportError:  # an earlier commit, of which that was asyncio's
        run = asyncio.run
    run(measure(Path(sys.argv[2]), sys.argv[3]))


def serve(hosts: str) -> int:
    """A server that answers each line on stdin with the CPU seconds of its threads so far, by name."""
    from disagg.servers.__main__ import main as server

    threading.Thread(target=_state_threads, name="benchmark", daemon=True).start()
    return server(["--config", hosts, "--host", "decode"])


def _state_threads() -> None:
    for _ in sys.stdin:
        used = {"process": time.process_time()}
        for thread in threading.enumerate():
            if thread.ident is not None:
                spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                used[thread.name] = used.get(thread.name, 0.0) + spent
        print(json.dumps(used), flush=True)


async def measure(folder: Path, engine: str) -> None:
    hosts, token = folder / "hosts.toml", folder / "token"
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hosts.write_text(HOSTS.format(folder=folder, ports=free_ports(2), engine=ENGINES[engine]))
    token.write_text(secrets.token_urlsafe(32))
    token.chmod(0o600)
    os.environ["DISAGG_TOKEN_FILE"] = str(token)
    with running(folder, hosts) as server:
        async with AsyncClient(hosts) as client:
            await client.connect(MODEL)
            await Window(client, server, 1, 4 * EDGE).measured()  # what the first request alone does
            print("ready", flush=True)
            for line in sys.stdin:
                streams, tokens = map(int, line.split())
                print(json.dumps(await Window(client, server, streams, tokens).measured()), flush=True)


@contextmanager
def running(folder: Path, hosts: Path) -> Iterator[subprocess.Popen[str]]:
    """The server, once it is ready."""
    log = folder / "server.log"
    with log.open("w") as errors:
        argv = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__, "server", str(hosts)]
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        ends = time.monotonic() + START_S
        while '"event": "ready"' not in log.read_text():
            if server.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield server
    finally:
        server.terminate()
        server.wait()


class Window:
    """So many answers at a time, measured from the moment at which each has EDGE tokens until one of them has all but
    EDGE."""

    def __init__(self, client: AsyncClient, server: subprocess.Popen[str], streams: int, tokens: int) -> None:
        self._client, self._server, self._tokens = client, server, tokens
        self._arrived = [0] * streams
        self._chunks = 0
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    async def measured(self) -> dict[str, float]:
        """Microseconds of CPU per token, of each thread of the server and of this process. `tokens`: that were counted;
        `chunk`: tokens per chunk that was read; `ms`: between two tokens of an answer."""
        await asyncio.gather(*(self._answer(number) for number in range(len(self._arrived))))
        first, last = self._first, self._last
        tokens = last["tokens"] - first["tokens"]
        used = {name: last["server"][name] - first["server"].get(name, 0.0) for name in last["server"]}
        cost = {name: 1e6 * seconds / tokens for name, seconds in used.items()}
        elapsed, chunks = last["now"] - first["now"], last["chunks"] - first["chunks"]
        process, loop = cost.pop("process"), cost.pop("MainThread")
        cost.pop("benchmark", None)
        engine = max(cost.values(), default=0.0)
        return {
            "client": 1e6 * (last["client"] - first["client"]) / tokens,
            "loop": loop,
            "engine": engine,
            "rest": process - loop - engine,
            "tokens": tokens,
            "chunk": tokens / chunks,
            "ms": 1e3 * elapsed * len(self._arrived) / tokens,
        }

    async def _answer(self, number: int) -> None:
        prompt = f"{secrets.token_hex(8)} def first(items, limit):\n"
        async with self._client.stream(
            MODEL, prompt, max_tokens=self._tokens, ignore_eos=True, alone="decode"
        ) as stream:
            async for chunk in stream:
                self._arrived[number] += len(chunk.tokens)
                self._chunks += 1
                if not self._first and min(self._arrived) >= EDGE:
                    self._first = self._sample()
                elif self._first and not self._last and max(self._arrived) >= self._tokens - EDGE:
                    self._last = self._sample()

    def _sample(self) -> dict[str, Any]:
        client = time.process_time()
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write("\n")
        self._server.stdin.flush()
        return {
            "server": json.loads(self._server.stdout.readline()),
            "client": client,
            "now": time.monotonic(),
            "tokens": sum(self._arrived),
            "chunks": self._chunks,
        }


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    main()
