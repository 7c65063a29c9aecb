"""`python -m tests.fifty`: many notebooks through a demo fleet of its own while a decode host is killed and comes back.

Checks that each notebook has exactly one grade and was asked about three times, and prints what it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from grader import rubric
from grader.models import Gateway
from grader.pipeline import Pipeline, Progress
from grader.rubric import Assignment
from grader.store import Store
from tests import fleet
from tests.fleet import Fleet

ROOT: Final = Path(__file__).parents[1]
DEMO: Final = ROOT.parents[1] / "disagg" / "demo" / "hosts.toml"
SAMPLES: Final = ("right", "half", "failing", "empty", "injection")
BATCH: Final = "fifty"


def main(
    notebooks: Annotated[int, typer.Option(help="How many.")] = 50,
    sections: Annotated[int, typer.Option(help="Of the sample's rubric: fewer make shorter answers.")] = 3,
    victim: Annotated[str, typer.Option(help="The decode host that is killed.")] = "decode-1",
) -> None:
    with tempfile.TemporaryDirectory(prefix="grader-fifty-") as folder, fleet.running(Path(folder), DEMO) as running:
        asyncio.run(run(running, notebooks, sample(sections), victim))


async def run(running: Fleet, notebooks: int, assignment: Assignment, victim: str) -> None:
    store, gateway = Store(running.folder / "grades.db"), Gateway(running.url, deadline=900)
    added = [store.add(BATCH, assignment.name, *student(number)) for number in range(notebooks)]
    ended: list[Progress] = []

    def observe(event: Progress) -> None:
        if event.layer is None:
            ended.append(event)
            print(f"{len(ended):3} {event.name} {event.state} {event.detail}", flush=True)

    began = time.monotonic()
    fault = asyncio.create_task(kill_and_start(running, victim, ended, notebooks))
    await Pipeline(store, gateway, {assignment.name: assignment}, observe).drain(BATCH)
    seconds = time.monotonic() - began
    await fault
    await gateway.close()
    check(store, added, ended)
    report(store, seconds)
    store.close()


async def kill_and_start(running: Fleet, victim: str, ended: list[Progress], notebooks: int) -> None:
    """Kill the host once a fifth of the notebooks has ended, and start it once two fifths have, or after 2 minutes."""
    await until(lambda: len(ended) >= notebooks // 5)
    (record,) = running.folder.glob(f"state/disagg/*/{victim}.pid")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    print(f"--- {victim} is killed", flush=True)
    with contextlib.suppress(TimeoutError):
        await until(lambda: len(ended) >= 2 * notebooks // 5, 120)
    await asyncio.to_thread(running.disagg, "start")
    print(f"--- {victim} is back after {len(ended)} notebooks", flush=True)


async def until(condition: Callable[[], bool], deadline_s: float = 3600) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.05)


def check(store: Store, added: list[int], ended: list[Progress]) -> None:
    states = Counter(one.state for one in store.batch(BATCH))
    assert states == {"done": len(added)}, states
    assert sorted(event.submission for event in ended) == sorted(added), "a notebook ended twice, or never"
    assert all(store.grade(one) is not None for one in added)
    roles = {tuple(sorted(run.role for run in store.runs(one))) for one in added}
    assert roles == {("code", "feedback", "writing")}, roles


def report(store: Store, seconds: float) -> None:
    runs = store.runs()
    notebooks = len(store.batch(BATCH))
    print(f"{notebooks} notebooks graded once each in {seconds:.0f} s, {len(runs)} answers of models")
    print(f"methods: {dict(Counter(run.method for run in runs))}; tried again: {sum(run.retries > 0 for run in runs)}")
    print(f"fallbacks: {sum(bool(run.fallback) for run in runs)}; unusable: {sum(bool(run.error) for run in runs)}")


def sample(sections: int) -> Assignment:
    loaded = rubric.load(ROOT / "assignments" / "sample")
    return replace(loaded, rubric=loaded.rubric.model_copy(update={"sections": loaded.rubric.sections[:sections]}))


def student(number: int) -> tuple[str, bytes]:
    """Name and notebook of a student: one of the samples, with a text of its own."""
    content = json.loads((ROOT / "samples" / f"{SAMPLES[number % len(SAMPLES)]}.ipynb").read_text("utf-8"))
    own = {"cell_type": "markdown", "id": "own", "metadata": {}, "source": [f"Student {number}"]}
    content["cells"].insert(0, own)
    return f"student-{number:02}.ipynb", json.dumps(content).encode()


if __name__ == "__main__":
    typer.run(main)
