"""A keeper in the test's own process, whose models' processes are stand-ins (tests/keeper/stand_in.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from disagg.api.keeper import LoadEvent
from disagg.config import load
from disagg.keeper.child import Patience
from disagg.keeper.keeper import Keeper
from disagg.keeper.processes import Machine, Starting
from disagg.ledger import Ledger, MachineRoom
from tests.deadlines import LONG_S
from tests.ports import free_range

MODEL_BYTES = 100_000_000
"""What a model takes, by its KV alone."""
STAND_IN = (sys.executable, "-m", "tests.keeper.stand_in")


def write(folder: Path, models: Sequence[str], keys: str = "", *, ports: str = "", role: str = "decode") -> Path:
    """hosts.toml with the host h, which has these models. keys: more lines of its table."""
    if not ports:
        free = free_range(2 * 8)
        ports = f"{free[0]}-{free[-1]}"
    tables = "".join(
        f'[models."{name}"]\ncontext = 1024\nsources = {{simulated = "shape:qwen3-8b"}}\n' for name in models
    )
    path = folder / "hosts.toml"
    path.write_text(
        f'[fleet]\nname = "t"\n{tables}[hosts.h]\naddress = "127.0.0.1"\nport = 9\nroles = ["{role}"]\n'
        f'connector = "local"\nservice = "process"\nhardware = "m3-ultra"\nmodels = {list(models)}\nports = "{ports}"\n'
        f"{keys if 'min_stay' in keys else keys + chr(10) + 'min_stay = 0'}\n"
        f'engine = {{name = "simulated", max_kv_bytes = {MODEL_BYTES}}}\n'.replace("'", '"')
    )
    return path


@asynccontextmanager
async def keeping(
    path: Path,
    *,
    room: int = 1 << 40,
    patience: Patience = Patience(),  # noqa: B008 - frozen
    ledger: Path | None = None,
    state: str = "state",
) -> AsyncIterator[Keeper]:
    fleet = load(path)
    machine = Machine(MachineRoom(room), Ledger(ledger or path.parent / "memory"))
    keeper = Keeper(fleet, fleet.hosts["h"], path.parent / state, machine, Starting(STAND_IN, patience))
    running = asyncio.ensure_future(keeper.run())
    try:
        yield keeper
    finally:
        for kept in keeper.models:
            if kept.child is not None:
                kept.child.signal(signal.SIGCONT)
        keeper.stop()
        async with asyncio.timeout(LONG_S):
            await running
        keeper.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.01)


async def loaded(keeper: Keeper, model: str, keep_alive_s: float | None = None) -> list[LoadEvent]:
    """The events until it is ready."""
    async with asyncio.timeout(LONG_S):
        return [event async for event in keeper.load(model, keep_alive_s)]


def states(keeper: Keeper) -> dict[str, str]:
    return {one.model: one.state for one in keeper.stated()}


async def begin_request(keeper: Keeper, model: str) -> None:
    before = running(keeper, model)
    os.kill(pid(keeper, model), signal.SIGUSR1)
    await until(lambda: running(keeper, model) > before)


def end_request(keeper: Keeper, model: str) -> None:
    os.kill(pid(keeper, model), signal.SIGUSR2)


def running(keeper: Keeper, model: str) -> int:
    return next(one.running for one in keeper.stated() if one.model == model)


def pid(keeper: Keeper, model: str) -> int:
    found = next(one.pid for one in keeper.stated() if one.model == model)
    assert found is not None, f"{model} has no process"
    return found


def alive(number: int) -> bool:
    with suppress(OSError):
        text = Path(f"/proc/{number}/stat").read_text()
        return text.rpartition(")")[2].split()[0] != "Z"
    return False
