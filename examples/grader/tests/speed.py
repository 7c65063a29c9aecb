"""`python -m tests.speed`: one notebook from its upload to its grade, with simulated engines at a real fleet's speeds.

No model runs: the engines take the times that are predicted for their machines. Layers 1 and 2, gateway and servers are
real, and run on this machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from grader import rubric
from grader.models import Gateway
from grader.pipeline import Pipeline, Progress
from grader.store import Store
from tests import fleet
from tests.fleet import Fleet

ROOT: Final = Path(__file__).parents[1]
LIMIT_S: Final = 15.0
LEAST: Final = 1.5
"""Sum of the two reviews' times / time of the longer one."""


def main(rounds: Annotated[int, typer.Option(help="One notebook each, one after the other.")] = 5) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="grader-speed-") as folder,
        fleet.running(Path(folder), ROOT / "simulated.toml") as running,
    ):
        asyncio.run(run(running, rounds))


async def run(running: Fleet, rounds: int) -> None:
    assignment = rubric.load(ROOT / "assignments" / "sample")
    seconds, together = [], []
    for number in range(rounds):
        store, gateway = Store(":memory:"), Gateway(running.url)
        submission = store.add("b", assignment.name, "right.ipynb", report(number))
        ends = {"": time.monotonic()}

        def observe(event: Progress, ends: dict[str, float] = ends) -> None:
            if event.state == "done":
                ends[event.layer or "all"] = time.monotonic()

        await Pipeline(store, gateway, {assignment.name: assignment}, observe).drain()
        await gateway.close()
        grade, runs = store.grade(submission), store.runs(submission)
        store.close()
        assert grade is not None and grade.feedback is not None and grade.efficiency is not None
        assert all(one.simulated and not one.error for one in runs)
        seconds.append(grade.seconds)
        together.append(2 * grade.efficiency)
        print(f"simulated: {grade.seconds:.1f} s; two reviews at once: {together[-1]:.2f} times the longer one's time")
        steps = (("layers 1 and 2", "", "outputs"), ("reviews", "outputs", "code"), ("feedback", "code", "writing"))
        taken = [f"{name} {ends[last] - ends[first]:.1f} s" for name, first, last in steps]
        print(f"simulated:   {', '.join(taken)}")
        for one in runs:
            print(
                f"simulated:   {one.role} {one.model} {one.hosts}: {one.prompt_tokens} + {one.completion_tokens}"
                f" tokens, {one.seconds:.1f} s, TTFT {one.ttft or 0:.2f} s, decode {one.decode_speed or 0:.0f} tokens/s"
            )
    print(f"simulated: at most {max(seconds):.1f} s, median {statistics.median(seconds):.1f} s")
    print(f"simulated: reviews at once: median {statistics.median(together):.2f} times the longer one")
    assert max(seconds) < LIMIT_S, f"over {LIMIT_S} s"
    assert statistics.median(together) > LEAST, f"not over {LEAST}"


def report(number: int) -> bytes:
    """The right notebook with a number of its own: its prompts begin like those before, as students' do."""
    content = json.loads((ROOT / "samples" / "right.ipynb").read_text("utf-8"))
    for kind in ("code", "markdown"):
        cell = next(cell for cell in content["cells"] if cell["cell_type"] == kind)
        cell["source"] = [f"# Report {number}\n", *cell["source"]]
    return json.dumps(content).encode()


if __name__ == "__main__":
    typer.run(main)
