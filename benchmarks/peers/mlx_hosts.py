"""The servers that `mlx_server` compares, as processes of this machine with one compute thread each."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

from benchmarks.peers.answers import Answer, Events, post_all, read_disagg, read_openai
from disagg import AsyncClient
from disagg.config import Fleet, load
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.temporary import free_ports
from disagg.tls.certificate import client_tls

START_S = 600.0
# The variables that disagg's own servers set for `threads = 1` before they import a framework.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
TRANSFORMERS = 'engine = {name = "transformers", dtype = "float32", device = "cpu", threads = 1}'
_HOSTS = """
[fleet]
name = "peers"
[models.model]
context = 4096
sources = {{transformers = "{model}", vllm = "{model}", mlx = "{model}"}}
[hosts.prefill]
address = "127.0.0.1"
roles = ["prefill"]
model = "model"
port = {ports[0]}
connector = "local"
service = "process"
{prefill}
[hosts.decode]
address = "127.0.0.1"
roles = ["decode"]
model = "model"
port = {ports[1]}
kv_port = {ports[2]}
connector = "local"
service = "process"
engine = {{name = "mlx", dtype = "float32", threads = 1, max_kv_bytes = 1073741824}}
"""


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A running mlx_lm.server."""

    port: int

    async def answers(self, prompts: Sequence[str], tokens: int) -> Sequence[Answer]:
        options = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        bodies = [{"prompt": prompt, **options} for prompt in prompts]
        return await post_all(self.port, "/v1/completions", bodies, read_openai)


@dataclass(frozen=True, slots=True)
class FleetServer:
    """A running prefill and decode server."""

    fleet: Fleet
    token: str

    async def answers(self, prompts: Sequence[str], tokens: int) -> Sequence[Answer]:
        """POST /generate of the decode server."""
        headers = {"Authorization": f"Bearer {self.token}"}
        options = {"model": "model", "sampling": {"max_tokens": tokens, "ignore_eos": True}}
        port = self.fleet.hosts["decode"].port
        bodies = [{"prompt": prompt, "cache_salt": secrets.token_hex(8), **options} for prompt in prompts]
        return await post_all(port, "/generate", bodies, read_disagg, headers=headers, tls=client_tls(self.token))

    async def client_answers(self, prompts: Sequence[str], tokens: int) -> Sequence[Answer]:
        """The same through AsyncClient."""
        return await self._through_client(prompts, tokens, {"alone": "decode"})

    async def handed_over_answers(self, prompts: Sequence[str], tokens: int) -> Sequence[Answer]:
        """Through AsyncClient, prompts computed by the prefill server."""
        return await self._through_client(prompts, tokens, {})

    async def _through_client(self, prompts: Sequence[str], tokens: int, where: dict[str, Any]) -> Sequence[Answer]:
        async with AsyncClient(self.fleet, token=self.token) as client:
            return await asyncio.gather(*(_stream(client, prompt, tokens, where) for prompt in prompts))


async def _stream(client: AsyncClient, prompt: str, tokens: int, where: dict[str, Any]) -> Answer:
    events = Events()
    async with client.stream(
        "model", prompt, max_tokens=tokens, ignore_eos=True, cache_salt=secrets.token_hex(8), **where
    ) as stream:
        async for _ in stream:
            events.piece()
    completion = stream.completion
    if completion.warnings:
        raise ConnectionError(f"the hand-off failed: {completion.warnings[0]}")
    return Answer(events.sent, events.times, completion.metrics.prompt_tokens, completion.metrics.completion_tokens)


@contextmanager
def fleet_server(model: Path, folder: Path, prefill: str = TRANSFORMERS) -> Iterator[FleetServer]:
    """Start both servers, wait until they are healthy, and stop them on exit. prefill: lines of hosts.toml."""
    hosts = folder / "hosts.toml"
    hosts.write_text(_HOSTS.format(model=model, ports=free_ports(["127.0.0.1"] * 3, set()), prefill=prefill))
    fleet = load(hosts)
    state = State.of(fleet, folder / "state")
    lifecycle = FleetServers(fleet, state)
    try:
        for result in lifecycle.start(timeout_s=START_S):
            if result.error is not None:
                raise result.error
        yield FleetServer(fleet, state.tokens.current)
    finally:
        lifecycle.stop()


@contextmanager
def peer_server(model: Path, folder: Path) -> Iterator[PeerServer]:
    """Start mlx_lm.server without its prompt cache, wait until it answers, and stop it on exit."""
    (port,) = free_ports(["127.0.0.1"], set())
    argv = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    argv += ["--prompt-cache-size", "0", "--log-level", "WARNING"]
    log = folder / "mlx_lm.server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **ONE_THREAD})
    try:
        _wait_healthy(process, port, log)
        yield PeerServer(port)
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0) as answer:
                if answer.status == 200:
                    return
        except (URLError, ConnectionError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConnectionError(f"mlx_lm.server does not answer: {log.read_text()[-2000:]}") from None
        time.sleep(0.1)
