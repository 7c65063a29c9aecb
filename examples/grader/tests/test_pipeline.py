"""Notebooks through all layers, each exactly once, also after failures and an interruption. Without a kernel and with a
made-up gateway."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grader import report, rubric
from grader.errors import GraderError
from grader.pipeline import LAYERS, Pipeline, Progress
from grader.store import Store, final_points
from tests.fake import FakeGateway

ROOT = Path(__file__).parents[1]
SAMPLE = rubric.load(ROOT / "assignments" / "sample")
EMPTY = (ROOT / "samples" / "empty.ipynb").read_bytes()
INJECTION = (ROOT / "samples" / "injection.ipynb").read_bytes()
pytestmark = pytest.mark.usefixtures("no_kernel")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "grader.db")
    yield store
    store.close()


async def drained(store: Store, gateway: FakeGateway) -> list[Progress]:
    seen: list[Progress] = []
    await Pipeline(store, gateway, {SAMPLE.name: SAMPLE}, seen.append).drain()
    await gateway.close()
    return seen


async def test_notebooks_are_graded_once_each_while_hosts_fail_and_what_is_none_fails_alone(store: Store) -> None:
    names = [store.add("b", SAMPLE.name, name, data) for name, data in (("a", EMPTY), ("b", INJECTION), ("c", b"{"))]
    gateway = FakeGateway([503, 200, 429, 504, 503])
    seen = await drained(store, gateway)
    assert [one.state for one in store.batch("b")] == ["done", "done", "failed"]
    assert sorted(gateway.answered) == ["code"] * 2 + ["feedback"] * 2 + ["writing"] * 2
    assert store.grade(names[2]) is None and "not JSON" in store.batch("b")[2].error
    layers = [one.layer for one in seen if one.name == "b" and one.state == "done"]
    assert layers == [*LAYERS, None]
    grade = store.grade(names[1])
    assert grade is not None and grade.finds and grade.score.needs_review
    assert {run.role for run in store.runs(names[1])} == {"code", "writing", "feedback"}


def test_a_second_grade_of_a_submission_is_refused_by_the_database(store: Store) -> None:
    from tests.test_store import GRADE

    first = store.add("b", "sample", "a", EMPTY)
    store.finish(first, GRADE, [])
    with pytest.raises(sqlite3.IntegrityError):
        store.finish(first, GRADE, [])


async def test_what_ran_when_the_grader_ended_is_graded_by_the_next_one(store: Store) -> None:
    store.add("b", SAMPLE.name, "a", EMPTY)
    assert store.claim() is not None and store.claim() is None
    assert store.requeue() == 1
    await drained(store, FakeGateway())
    assert [one.state for one in store.batch("b")] == ["done"]


async def test_without_an_answer_before_the_deadline_a_notebook_fails_and_can_be_graded_later(store: Store) -> None:
    from grader.models import Gateway

    class Silent(FakeGateway):
        _wait = Gateway._wait

    store.add("b", SAMPLE.name, "a", EMPTY)
    await drained(store, Silent([503] * 2, deadline=0))
    assert store.batch("b")[0].state == "failed" and "no host" in store.batch("b")[0].error
    assert store.requeue("b", ("failed",)) == 1
    await drained(store, FakeGateway())
    assert store.batch("b")[0].state == "done"


async def test_equal_notebooks_make_equal_prompts_and_points(store: Store) -> None:
    first, second = (store.add("b", SAMPLE.name, name, INJECTION) for name in ("x", "y"))
    gateway = FakeGateway()
    await drained(store, gateway)
    assert len(set(gateway.prompts)) == 3
    one, other = store.grade(first), store.grade(second)
    assert one is not None and other is not None and one.score == other.score


async def test_the_table_has_a_row_per_notebook_with_corrections_and_no_formulas(store: Store) -> None:
    first = store.add("b", SAMPLE.name, "=cmd.ipynb", INJECTION)
    await drained(store, FakeGateway())
    with pytest.raises(GraderError):
        store.correct(first, "mean", 3.5, "too much")
    store.correct(first, "mean", 3, "by hand")
    grade = store.grade(first)
    assert grade is not None and final_points(grade.score, store.corrections(first))["mean"] == 3
    header, row = report.table(store, "b", SAMPLE.rubric).splitlines()
    assert header == "notebook,state,points,maximum,mean,table,plot,review,summary"
    assert row.startswith("'=cmd.ipynb,done,") and row.endswith(",'=1+1") and ",3.0," in row


async def test_a_solution_that_fails_fails_the_notebooks_with_its_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fake.RESULTS", {})
    for name in ("a", "b"):
        store.add("b", SAMPLE.name, name, EMPTY)
    await drained(store, FakeGateway())
    assert [one.state for one in store.batch("b")] == ["failed", "failed"]
    assert all("solution.ipynb: no variable mean" in one.error for one in store.batch("b"))


async def test_a_fault_with_one_notebook_does_not_end_the_others(store: Store) -> None:
    class Confused(FakeGateway):
        """Its first answer is none of a gateway."""

        async def _send(self, requests: Sequence[Any], began: float) -> tuple[dict[str, Any], str]:
            if not self.answered:
                self.answered.append("nothing")
                return {"results": [{}]}, ""
            return await super()._send(requests, began)

    for name in ("a", "b", "c"):
        store.add("b", SAMPLE.name, name, EMPTY)
    await drained(store, Confused())
    assert sorted(one.state for one in store.batch("b")) == ["done", "done", "failed"]
    assert [one.error for one in store.batch("b") if one.error] == ["a fault of the grader: KeyError: 'index'"]
