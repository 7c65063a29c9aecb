"""Faults of hosts with several models: a keeper, a model's process or both are killed or frozen, in each state of the
model. The results are a part of docs/faults.md."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import psutil

from disagg.api.keeper import KeptModel, ModelState
from disagg.config import Host
from disagg.errors import ModelBusy
from disagg.inference.client import AsyncClient
from disagg.inference.http import keeper_calls
from disagg.inference.http.connections import Connections
from disagg.inference.types import Chunk, Completion
from disagg.token import Tokens
from tests.faults import process
from tests.fleets import TOKEN, RunningFleet, running, write_kept_hosts
from tests.keeper.keeping import alive

Role = Literal["decode", "prefill"]
Victim = Literal["keeper", "model process", "machine"]
State = Literal["asleep", "loading", "ready", "in the answer", "draining"]
How = Literal["killed", "frozen"]
Strike = Callable[[], None]
MODEL, OTHER = "qwen3", "llama"
PROMPT: Final = tuple(10 + n * 37 % 200 for n in range(64))
TOKENS: Final = 800
STRIKE_AT: Final = 20  # tokens of the answer
DEADLINE_S: Final = 120.0
BOUND_S: Final = 60.0
"""From the fault to the end of the request: its detection, a load elsewhere, which takes 5 to 10 s of a core, and the
rest of the answer."""
SOON_S: Final = 30.0
STATES: Final[dict[State, ModelState]] = {
    "asleep": "asleep",
    "loading": "loading",
    "ready": "ready",
    "in the answer": "ready",
    "draining": "draining",
}


@dataclass(frozen=True, slots=True)
class KeptCell:
    """machine: the keeper and all its processes."""

    role: Role
    victim: Victim
    how: How
    state: State

    @property
    def id(self) -> str:
        return f"{self.role} host: {self.victim} {self.how}, {self.state}"


@dataclass(slots=True)
class KeptResult:
    """seconds: from the fault to the end of the request. detail: how it was answered, and what the caller was told."""

    cell: KeptCell
    seconds: float = 0.0
    detail: str = ""
    problems: list[str] = field(default_factory=list)


def cells() -> Iterator[KeptCell]:
    """Every row. On a prefill host nothing of an answer runs, nor does a request keep it from draining."""
    for state in get_args(State):
        for victim in get_args(Victim):
            for how in get_args(How):
                if victim != "model process" or state != "asleep":
                    yield KeptCell("decode", victim, how, state)
                    if state in ("loading", "ready"):
                        yield KeptCell("prefill", victim, how, state)


REPRESENTATIVE: Final = (
    KeptCell("decode", "keeper", "killed", "loading"),
    KeptCell("decode", "model process", "frozen", "ready"),
)


@contextmanager
def kept_faults(folder: Path) -> Iterator[KeptFaults]:
    """Two decode hosts and a prefill host with two tiny models each, one of which they may load."""
    from tests import tiny_models  # imports torch

    models = {name: tiny_models.make(name, folder / name) for name in (MODEL, OTHER)}
    with running(write_kept_hosts(folder, models, prefill=1, decode=2, max_loaded=1)) as fleet:
        yield KeptFaults(fleet, asyncio.run(_undisturbed(fleet)))


async def _undisturbed(fleet: RunningFleet) -> list[int]:
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        return _ids(await _answer(client, MODEL))


@dataclass(slots=True)
class _Struck:
    """victims: what the fault has struck. models: the processes that the keeper had then."""

    victims: list[psutil.Process] = field(default_factory=list)
    models: list[psutil.Process] = field(default_factory=list)


@dataclass(slots=True)
class KeptFaults:
    """expected: the tokens of the undisturbed answer."""

    fleet: RunningFleet
    expected: list[int]

    def run(self, cell: KeptCell) -> KeptResult:
        """One row. Heals the fleet afterwards."""
        result, struck = KeptResult(cell), _Struck()
        try:
            asyncio.run(self._run(cell, result, struck))
        except Exception as error:  # noqa: BLE001 - a bad row
            result.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._heal(cell, result, struck)
        return result

    async def _run(self, cell: KeptCell, result: KeptResult, struck: _Struck) -> None:
        async with AsyncClient(self.fleet.fleet, token=TOKEN) as client, Connections(Tokens(TOKEN)) as http:
            for host in self._hosts():
                for model in host.models:
                    await unloaded(http, host, model)
            await client.connect()
            asked = asyncio.create_task(self._request(client, http, cell, struck))
            completion, struck_at = await asked
        result.seconds = time.monotonic() - struck_at
        notes = "; ".join(dict.fromkeys(completion.warnings))
        result.detail = f"{completion.metrics.method}{': ' if notes else ''}{notes}"
        if _ids(completion) != self.expected[: len(completion.tokens)]:
            result.problems.append("wrong tokens")
        if result.seconds > BOUND_S:
            result.problems.append(f"ended {result.seconds:.1f} s after the fault")

    async def _request(
        self, client: AsyncClient, http: Connections, cell: KeptCell, struck: _Struck
    ) -> tuple[Completion, float]:
        """One request, and when the fault struck."""
        if cell.state == "ready":
            await _answer(client, MODEL, 1)
        if cell.state in ("asleep", "ready"):
            struck_at = await self._strike(http, cell, struck)
            return await _answer(client, MODEL, local=cell.role == "decode"), struck_at
        begun, chunks = asyncio.Event(), list[Chunk]()

        def arrived(chunk: Chunk) -> None:
            chunks.append(chunk)
            if sum(len(one.tokens) for one in chunks) >= STRIKE_AT:
                begun.set()

        asking = asyncio.create_task(_answer(client, MODEL, TOKENS, arrived))
        if cell.state != "loading":
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
        wanting = None
        if cell.state == "draining":
            host, _ = await self._found(http, cell, "ready")
            wanting = asyncio.create_task(_loaded(http, host, OTHER))
        struck_at = await self._strike(http, cell, struck)
        completion = await asking
        if wanting is not None:
            wanting.cancel()
            await asyncio.wait((wanting,))
        return completion, struck_at

    async def _strike(self, http: Connections, cell: KeptCell, struck: _Struck) -> float:
        host, kept = await self._found(http, cell, STATES[cell.state])
        keeper = psutil.Process(self.fleet.processes[host.name].pid)
        struck.models = keeper.children()
        models = [child for child in struck.models if cell.victim == "machine" or child.pid == kept.pid]
        victims = [*([keeper] if cell.victim != "model process" else []), *([] if cell.victim == "keeper" else models)]
        struck_at = time.monotonic()
        struck.victims = victims
        for victim in victims:
            (process.kill if cell.how == "killed" else process.freeze)(victim.pid)
        return struck_at

    async def _found(self, http: Connections, cell: KeptCell, state: ModelState) -> tuple[Host, KeptModel]:
        """The first host of the role that states this state of the model, once there is one with its process."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            for host in self._hosts(cell.role):
                for kept in await keeper_calls.models(http, host):
                    if (kept.model, kept.state) == (MODEL, state) and (kept.pid is None) == (state == "asleep"):
                        return host, kept
            await asyncio.sleep(0.05)
        raise TimeoutError(f"no {cell.role} host stated that the model is {state}")

    def _heal(self, cell: KeptCell, result: KeptResult, struck: _Struck) -> None:
        """Frozen processes go on. Keepers that were killed have left no process, and are started again."""
        for victim in struck.victims:
            process.thaw(victim.pid)
        for host in self._hosts():
            server = self.fleet.processes[host.name]
            if cell.how == "killed" and any(victim.pid == server.pid for victim in struck.victims):
                server.wait()
                left = _left_of(struck.models)
                if left:
                    result.problems.append(f"{len(left)} processes of {host.name} outlive their keeper")
                for one in left:
                    process.kill(one.pid)
                del self.fleet.processes[host.name]
                self.fleet.start(host)
            self.fleet.wait_ready(host)

    def _hosts(self, role: Role | None = None) -> list[Host]:
        return [host for host in self.fleet.fleet.hosts.values() if role in (None, *host.roles)]


async def _answer(
    client: AsyncClient,
    model: str,
    tokens: int = TOKENS,
    arrived: Callable[[Chunk], object] = bool,
    *,
    local: bool = True,
) -> Completion:
    """local: the decode host may compute the prompt itself, though nothing has failed."""
    salt = secrets.token_hex(8)  # KV that a host holds of an earlier request would need no prefill host
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "timeout": DEADLINE_S, "split": "off"}
    options |= {"cache_salt": salt, "local_prefill": local}
    async with client.stream(model, tokens=PROMPT, **options) as stream:
        async for chunk in stream:
            arrived(chunk)
    return stream.completion


async def unloaded(http: Connections, host: Host, model: str) -> None:
    """Unload a model. Its keeper may count a request for a moment that has just ended."""
    deadline = time.monotonic() + SOON_S
    while True:
        try:
            await keeper_calls.unload(http, host, model)
        except ModelBusy:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def _loaded(http: Connections, host: Host, model: str) -> None:
    async for _ in keeper_calls.load(http, host, model):
        pass


def _ids(completion: Completion) -> list[int]:
    return [token.id for token in completion.tokens]


def _left_of(models: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run though their keeper has ended, once they have had time to end."""
    deadline = time.monotonic() + SOON_S
    while (left := [one for one in models if alive(one.pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def line(result: KeptResult) -> str:
    """One result as a line of a log."""
    problems = f"  <- {'; '.join(result.problems)}" if result.problems else ""
    return f"{'BAD' if problems else 'ok '} {result.seconds:5.1f} s  {result.cell.id}: {result.detail}{problems}"


PART: Final = "## Hosts with several models\n"
_ABOUT: Final = """
`python -m tests.faults kept --write docs/faults.md`: two decode hosts and a prefill host, each with two tiny models of
which one may be loaded. *Machine*: the keeper and all processes of its models. A row holds if the answer is exact and
ends within {bound:g} s of the fault, most of which is the load of the model on the other host, and if no process of a
model outlives its keeper. No service manager starts anything again here.

"""


def read(path: Path) -> dict[str, KeptResult]:
    """The rows of an earlier run that hold, by the names of their cells."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [KeptResult(**{**fields, "cell": KeptCell(**fields["cell"])}) for fields in map(json.loads, lines)]
    return {result.cell.id: result for result in found if not result.problems}


def part(results: Sequence[KeptResult]) -> str:
    """The part of docs/faults.md about these rows."""
    held = sum(not one.problems for one in results)
    return (
        PART
        + _ABOUT.format(bound=BOUND_S)
        + f"**{held} of {len(results)} hold.**\n\n"
        + "\n".join(_table(results))
        + "\n"
    )


def with_part(page: str, part: str) -> str:
    """The page with this part in place of the one that it has, at its end."""
    return page.partition(PART)[0].rstrip("\n") + "\n\n" + part


def part_of(page: str) -> str:
    """The part that a page has; empty if it has none."""
    _, found, rest = page.partition(PART)
    return found + rest


def _table(results: Sequence[KeptResult]) -> list[str]:
    return [
        "| host | what | fault | model | outcome | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {one.cell.role} | {one.cell.victim} | {one.cell.how} | {one.cell.state} | "
            f"{one.detail or 'no answer'}{' **' + '; '.join(one.problems) + '**' if one.problems else ''} | "
            f"{one.seconds:.1f} |"
            for one in results
        ),
    ]
