"""Many streams through one gateway, and what becomes of them if it is killed.

    python -m benchmarks.gateway_load [--streams 200] [--seconds 180] [--kill]

The demo fleet and a gateway as servers of this machine. Every stream asks again as soon as its answer has ended, at
temperature 0, for a prompt whose answer is known from one request alone. With --kill, the gateway is killed (SIGKILL)
and started again. One JSON object; the exit code is 1 if an answer was wrong, an answer was cut and looked complete,
the history lacks a complete answer, or without --kill anything failed. `memory_holds` tells whether no server's memory
grew by more than MEMORY_BOUND in the last half of the run; the exit code does not depend on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import psutil

from disagg.config import Fleet, load
from disagg.demo.flow import HOSTS_FILE
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.temporary import RunningFleet, temporary_fleet
from disagg.gateway.watch.history import Filter, history_path, read
from disagg.token import GATEWAY_FOLDER_VARIABLE

START_S: Final = 180.0
SETTLED_S: Final = 10.0  # after which memory should stay as it is, and between two looks at it
MEMORY_BOUND: Final = 0.02  # growth of a server's memory in the last half of a run, as a share
AGAIN_S: Final = 0.2  # after a refusal
TIMEOUT_S: Final = 120.0
PORT: Final = 18090
CONTEXT: Final = 8192  # of the demo's models in its hosts.toml
GATEWAY: Final = f"""
[hosts.gateway]
address = "127.0.0.1"
roles = ["gateway"]
port = {PORT}
connector = "local"
service = "process"
"""
Bodies = tuple[dict[str, Any], ...]
BODIES: Final[Bodies] = tuple(
    {"model": model, "prompt": f"class Stack{number}:\n    def", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    for model in ("qwen", "gpt-oss")
    for number in range(4)
)


class End(StrEnum):
    """How a stream ended, as its caller sees it. cut: without an error, and without what marks a complete answer."""

    COMPLETE = "complete"
    ERROR = "error event"
    BROKEN = "broken"
    REFUSED = "refused"
    CUT = "cut"


class Question(NamedTuple):
    """A request and the text of its answer."""

    body: Mapping[str, Any]
    text: str


class Seen(NamedTuple):
    """One stream. finished: its answer had a finish reason, whatever came after it."""

    request_id: str
    text: str
    end: End
    finished: bool


@dataclass
class Tally:
    """What all streams have seen. wrong: answers whose text is not that of the same request alone, or its beginning."""

    ends: Counter[End] = field(default_factory=Counter)
    finished: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def add(self, seen: Seen, text: str) -> None:
        self.ends[seen.end] += 1
        if seen.finished:
            self.finished.add(seen.request_id)
        if seen.text != text if seen.finished else not text.startswith(seen.text):
            self.wrong.append(seen.request_id)


async def stream_once(http: httpx.AsyncClient, request_id: str, body: Mapping[str, Any]) -> Seen:
    """Send one request and read its stream to whatever end it has."""
    texts: list[str] = []
    finished, end = False, End.CUT
    try:
        headers = {"X-Request-Id": request_id}
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                return Seen(request_id, "", End.REFUSED, finished=False)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    end = End.COMPLETE if finished else End.CUT
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        end = End.ERROR
                    for choice in event.get("choices", ()):
                        texts.append(choice["text"])
                        finished = finished or choice["finish_reason"] is not None
    except httpx.ConnectError:
        end = End.REFUSED
    except httpx.HTTPError:
        end = end if end == End.COMPLETE else End.BROKEN
    return Seen(request_id, "".join(texts), end, finished)


async def load_gateway(
    url: str, questions: Sequence[Question], streams: int, tally: Tally, until: asyncio.Event
) -> None:
    """So many streams, each again and again until `until` is set."""

    async def caller(number: int) -> None:
        count = 0
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
            while not until.is_set():
                question = questions[(number + count) % len(questions)]
                seen = await stream_once(http, f"load-{number}-{count}", question.body)
                tally.add(seen, question.text)
                count += 1
                if seen.end != End.COMPLETE:
                    await asyncio.sleep(AGAIN_S)

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(caller(number))


async def asked_alone(url: str, bodies: Bodies) -> list[Question]:
    """Each body with its answer, asked for one after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        found = [await stream_once(http, f"alone-{number}", body) for number, body in enumerate(bodies)]
    if failed := [seen for seen in found if seen.end != End.COMPLETE]:
        raise SystemExit(f"a request alone failed: {failed[0]}")
    return [Question(body, seen.text) for body, seen in zip(bodies, found, strict=True)]


def missing_from_history(fleet: Fleet, finished: set[str]) -> set[str]:
    """The requests that a caller has seen complete, and the history has not."""
    kept: set[str] = set()
    before: int | None = None
    while page := list(read(history_path(fleet), Filter(limit=1000, before=before))):
        kept |= {entry.request_id for entry in page if entry.state == "ok"}
        before = page[-1].id
    return finished - kept


@contextmanager
def running(folder: Path, context: int = CONTEXT) -> Iterator[RunningFleet]:
    """The demo fleet with a gateway, on free ports; the gateway's files are in the folder. context: of both models."""
    os.environ[GATEWAY_FOLDER_VARIABLE] = str(folder)
    path = folder / "hosts.toml"
    path.write_text(HOSTS_FILE.read_text().replace(f"context = {CONTEXT}", f"context = {context}") + GATEWAY)
    with temporary_fleet(load(path), timeout_s=START_S) as fleet:
        yield fleet


def start(servers: FleetServers) -> None:
    if failed := [result for result in servers.start(timeout_s=START_S) if not result.ok]:
        raise SystemExit(f"the fleet did not start: {failed}")


def resident(fleet: Fleet, state: State) -> dict[str, float]:
    """MiB of each server's process."""
    pids = {name: record.pid for name in fleet.hosts if (record := state.recorded(name)) is not None}
    return {name: round(psutil.Process(pid).memory_info().rss / 2**20, 1) for name, pid in pids.items()}


def growth(looks: Sequence[float | None]) -> float | None:
    """By which share memory grew in the last half of these looks, on the line that fits them best; None for fewer than
    three."""
    values = [look for look in looks[len(looks) // 2 :] if look is not None]
    if len(values) < 3:
        return None
    line = statistics.linear_regression(range(len(values)), values)
    return round(line.slope * (len(values) - 1) / line.intercept, 4)


async def measure(fleet: Fleet, state: State, options: argparse.Namespace) -> tuple[Tally, list[dict[str, float]]]:
    """The tally, and the memory of the servers once the load has settled, every SETTLED_S and at the end."""
    url, until, memory = fleet.hosts["gateway"].url, asyncio.Event(), list[dict[str, float]]()
    questions = await asked_alone(url, BODIES)
    tally = Tally()
    loading = asyncio.ensure_future(load_gateway(url, questions, options.streams, tally, until))
    await asyncio.sleep(min(SETTLED_S, options.seconds / 2))
    memory.append(resident(fleet, state))
    if options.kill:
        record = state.recorded("gateway")
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        await asyncio.to_thread(start, FleetServers(fleet, state, own_session=False))
    for _ in range(round((options.seconds - SETTLED_S) / SETTLED_S)):
        await asyncio.sleep(SETTLED_S)
        memory.append(resident(fleet, state))
    until.set()
    await loading
    return tally, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-load-") as name, running(Path(name)) as (fleet, state):
        began = time.monotonic()
        tally, memory = asyncio.run(measure(fleet, state, options))
        seconds = time.monotonic() - began
        missing = missing_from_history(fleet, tally.finished)
    looks = {name: [look.get(name) for look in memory] for name in memory[0]}
    growths = {name: growth(values) for name, values in looks.items()}
    result = {
        "streams": options.streams,
        "seconds": round(seconds, 1),
        "ends": dict(tally.ends),
        "wrong": len(tally.wrong),
        "missing_from_history": len(missing),
        "memory_mib": looks,
        "memory_growth": growths,
        "memory_bound": MEMORY_BOUND,
        "memory_holds": all(share is not None and share <= MEMORY_BOUND for share in growths.values()),
    }
    print(json.dumps(result, indent=2))
    allowed = set(End) - {End.CUT} if options.kill else {End.COMPLETE}
    raise SystemExit(1 if tally.wrong or missing or set(tally.ends) - allowed else 0)


if __name__ == "__main__":
    main()
