"""What clients that send bodies in tiny chunks cost all others: their time to the first token.

    python -m benchmarks.greedy_bodies [--seconds 6] [--chunk 1] [--send 65536] [--rate 2]

A simulated pair with a gateway, all servers on one core, everything that asks them on another (where the system can
pin: Linux). Attackers keep so many connections open, to the gateway or to the decode host's port, and send chunked
bodies without end on each, 2 MB/s in chunks of one byte; one that is closed is opened again. Without the key (at the
host: the fleet's token), or with it. Meanwhile one client asks the gateway for two tokens, again and again, each time
on a new connection. Prints a Markdown table, milliseconds: its median and longest TTFT, and by how much they are longer
than without attackers. The exit code is 1 if a median is longer by more than 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from benchmarks import gateway
from benchmarks.gateway_ways import Caller
from disagg.config import Fleet
from disagg.fleet.lifecycle.state import State
from disagg.gateway.clients.keys import KeyFile
from disagg.tls.certificate import unchecked_context
from disagg.token import GATEWAY_FOLDER_VARIABLE

GOAL_MS: Final = 50.0
CONNECTIONS: Final = (1, 4, 16)
PATIENCE_S: Final = 60.0  # for one answer
SETTLE_S: Final = 0.5
WARM_UP_S: Final = 2.0
CREDENTIAL_VARIABLE: Final = "GREEDY_BODIES_CREDENTIAL"
PATHS: Final = {"gateway": "/v1/completions", "decode": "/generate"}


class Attack(NamedTuple):
    """Who is attacked, with a valid credential or without one, and on how many connections."""

    target: str
    proven: bool
    connections: int


class Seen(NamedTuple):
    """Milliseconds to the first token of each answer, and the share of a core that the attacked process took."""

    ttft: Sequence[float]
    cpu: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=6.0, help="per row")
    options.add_argument("--chunk", type=int, default=1, help="bytes in a chunk")
    options.add_argument("--send", type=int, default=1 << 16, help="bytes that an attacker sends at a time")
    options.add_argument("--rate", type=float, default=2.0, help="MB/s on each connection")
    options.add_argument("--attack", nargs=4, metavar=("PORT", "PATH", "CONNECTIONS", "TLS"), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.attack:
        port, path, connections, tls = args.attack
        attack(int(port), path, int(connections), args, tls=tls == "tls")
        return
    with tempfile.TemporaryDirectory(prefix="disagg-greedy-") as name:
        os.environ[GATEWAY_FOLDER_VARIABLE] = name
        with servers(Path(name)) as (fleet, state):
            raise SystemExit(asyncio.run(measure(fleet, state, args)))


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Fleet, State]]:
    """The simulated pair with a gateway, pinned to one core; this program goes on on another."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    pin(cores[-1:])
    with gateway.simulated(folder) as running:
        pin(cores[:1])
        yield running


def pin(cores: Sequence[int]) -> None:
    """Run on these cores only, as do programs that are started from now on."""
    if sys.platform == "linux" and cores:
        os.sched_setaffinity(0, cores)


async def measure(fleet: Fleet, state: State, args: argparse.Namespace) -> int:
    key = KeyFile.of(fleet).add("benchmark")
    await answers(fleet, state, "gateway", key, WARM_UP_S)
    alone = await answers(fleet, state, "gateway", key, args.seconds)
    median, longest = statistics.median(alone.ttft), max(alone.ttft)
    print(f"load {os.getloadavg()[0]:.1f}; alone: median TTFT {median:.1f} ms, longest {longest:.1f} ms")
    print(
        "| attacked | credential | connections | median TTFT | more | longest | more | answers | CPU of the attacked |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    missed = False
    for target, proven, connections in product(PATHS, (False, True), CONNECTIONS):
        wanted = Attack(target, proven, connections)
        with attackers(fleet, wanted, key if target == "gateway" else state.tokens.current, args):
            await asyncio.sleep(SETTLE_S)
            seen = await answers(fleet, state, target, key, args.seconds)
        missed |= statistics.median(seen.ttft) - median > GOAL_MS
        print(row(wanted, seen, alone), flush=True)
        await asyncio.sleep(2 * SETTLE_S)
    return int(missed)


def row(attack: Attack, seen: Seen, alone: Seen) -> str:
    median, longest = statistics.median(seen.ttft), max(seen.ttft)
    cells = [attack.target, "yes" if attack.proven else "no", str(attack.connections)]
    cells += [f"{median:.1f}", f"{median - statistics.median(alone.ttft):+.1f}"]
    cells += [f"{longest:.1f}", f"{longest - max(alone.ttft):+.1f}", str(len(seen.ttft)), f"{seen.cpu:.0%}"]
    return f"| {' | '.join(cells)} |"


async def answers(fleet: Fleet, state: State, target: str, key: str, seconds: float) -> Seen:
    """Ask the gateway again and again for so long. What never comes counts with PATIENCE_S."""
    record = state.recorded(target)
    assert record is not None
    attacked = psutil.Process(record.pid)
    ttft, ends, began, cpu = list[float](), time.monotonic() + seconds, time.monotonic(), sum(attacked.cpu_times()[:2])
    while time.monotonic() < ends:
        asked = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await first_token(fleet, key)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            ttft.append(PATIENCE_S * 1000)
        else:
            ttft.append((time.perf_counter() - asked) * 1000)
    return Seen(ttft, (sum(attacked.cpu_times()[:2]) - cpu) / (time.monotonic() - began))


async def first_token(fleet: Fleet, key: str) -> None:
    """Ask on a new connection, as most clients do."""
    caller = await Caller.connected(fleet.hosts["gateway"].url, key)
    body = {"model": "model", "prompt": secrets.token_hex(8), "max_tokens": 2, "ignore_eos": True, "stream": True}
    with closing(caller):
        async for line in caller.lines(PATHS["gateway"], json.dumps(body).encode()):
            if line.startswith(b"data: {"):
                return


@contextmanager
def attackers(fleet: Fleet, wanted: Attack, credential: str, args: argparse.Namespace) -> Iterator[None]:
    """A process that attacks while the block runs."""
    host = fleet.hosts[wanted.target]
    tls = "tls" if host.url.startswith("https") else "plain"
    argv = [sys.executable, "-m", "benchmarks.greedy_bodies", "--chunk", str(args.chunk), "--send", str(args.send)]
    argv += ["--rate", str(args.rate), "--attack", str(host.port), PATHS[wanted.target], str(wanted.connections), tls]
    environment = {**os.environ, CREDENTIAL_VARIABLE: credential if wanted.proven else "wrong"}
    process = subprocess.Popen(argv, env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def attack(port: int, path: str, connections: int, args: argparse.Namespace, *, tls: bool) -> None:
    """Send bodies on so many connections until this process is killed."""
    chunk = b"%x\r\n%b\r\n" % (args.chunk, b"x" * args.chunk)
    sent = (
        (chunk * (args.send // len(chunk) + 1))[: max(args.send, 1)]
        if args.send < len(chunk)
        else chunk * (args.send // len(chunk))
    )
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {os.environ[CREDENTIAL_VARIABLE]}\r\n"
    )
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    context = unchecked_context() if tls else None
    for _ in range(connections):
        threading.Thread(target=send_for_ever, args=(port, context, head.encode(), sent, args.rate * 1e6)).start()


def send_for_ever(port: int, context: ssl.SSLContext | None, head: bytes, sent: bytes, rate: float) -> None:
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = context.wrap_socket(plain, server_hostname="disagg") if context else plain
            connection.sendall(head)
            due = time.monotonic()
            while True:
                connection.sendall(sent)
                due = max(due + len(sent) / rate, time.monotonic() - 1.0)
                time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
