"""The store alone."""

from __future__ import annotations

import pytest

from grader.errors import GraderError
from grader.score import Score, SectionScore
from grader.store import Grade, Store

SECTION = SectionScore(section="mean", points=1, maximum=3, shares={})
GRADE = Grade(score=Score(points=1, maximum=3, sections=(SECTION,)), validations=(), comparisons=(), feedback=None)


def test_a_name_is_taken_once_per_batch_and_its_notebook_cannot_change() -> None:
    store = Store(":memory:")
    assert store.add("b", "sample", "a", b"1") == store.add("b", "sample", "a", b"1")
    assert store.add("c", "sample", "a", b"2") != store.add("b", "sample", "a", b"1")
    with pytest.raises(GraderError):
        store.add("b", "sample", "a", b"2")
    store.close()


def test_no_two_claims_get_the_same_submission() -> None:
    store = Store(":memory:")
    added = [store.add("b", "sample", str(number), b"") for number in range(5)]
    claimed = []
    while (one := store.claim("b")) is not None:
        claimed.append(one.id)
    assert claimed == added
    store.close()


def test_only_what_is_in_the_states_asked_for_is_queued_again() -> None:
    store = Store(":memory:")
    done, failed, running = (store.add("b", "sample", name, b"") for name in ("done", "failed", "running"))
    other = store.add("c", "sample", "failed", b"")
    while store.claim() is not None:
        pass
    store.finish(done, GRADE, [])
    store.fail(failed, "no host")
    store.fail(other, "no host")
    assert store.requeue("b", ("failed",)) == 1
    states = [(one.id, one.state, one.error) for one in (*store.batch("b"), *store.batch("c"))]
    assert states == [
        (done, "done", ""),
        (failed, "queued", ""),
        (running, "running", ""),
        (other, "failed", "no host"),
    ]
    assert store.requeue() == 1
    store.close()
