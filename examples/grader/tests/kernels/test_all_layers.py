"""Two notebooks in the real sandbox through all layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grader import rubric
from grader.pipeline import Pipeline
from grader.rubric import Limits
from grader.store import Store
from tests.fake import FakeGateway

ROOT = Path(__file__).parents[2]
LOADED = rubric.load(ROOT / "assignments" / "sample")
PATIENT = Limits(cell_seconds=120, notebook_seconds=600)
SAMPLE = replace(LOADED, rubric=LOADED.rubric.model_copy(update={"limits": PATIENT}))


async def test_points_come_from_all_four_layers() -> None:
    store, gateway = Store(":memory:"), FakeGateway(points=2)
    names = ("right", "half")
    added = [store.add("b", SAMPLE.name, name, (ROOT / "samples" / f"{name}.ipynb").read_bytes()) for name in names]
    await Pipeline(store, gateway, {SAMPLE.name: SAMPLE}, lambda event: None).drain()
    await gateway.close()
    right, half = (store.grade(one) for one in added)
    store.close()
    assert right is not None and half is not None
    # The models' 2 of 3 points count as they are; 2 of 4 are moved to 0.65, the agreement below what is measured.
    assert [one.points for one in right.score.sections] == [2.65, 3.51, 2.65]
    assert right.score.points == 8.81 and [bool(one.review) for one in right.score.sections] == [False, True, False]
    assert half.score.points < right.score.points
    assert right.feedback is not None and right.efficiency == 0.75
