"""disagg/engines/vllm/served/engine.py: a prompt's steps and its end, from reports and from the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from disagg.api.delivery import KVProgress, KVReport, OrderAnswer
from disagg.engines.sending.reports import Reports
from disagg.engines.sending.runs import Run
from disagg.engines.vllm.served.engine import ServedPrompt
from disagg.errors import DisaggError, ModelError, PeerLost
from tests.engines.vllm.served.fake_serve import completed

TAKEN = completed(OrderAnswer().to_json())


class NoEngine:
    """Steps that bring nothing."""

    def step(self) -> None: ...

    def drop(self, run: Run) -> None: ...


@pytest.fixture
def run() -> Iterator[ServedPrompt]:
    with closing(Reports()) as reports:
        run = ServedPrompt(NoEngine(), 300, reports.expect("an id of sixteen"), reports, deadline=float("inf"))
        run._started = 0.0
        yield run
        run.close()
        assert reports.outstanding == 0


def test_a_step_lasts_until_the_next_one_and_the_last_until_the_answer(run: ServedPrompt) -> None:
    run.begin_step(KVProgress(100, 200, 1.0), 10.0)
    assert (run.remaining, run.done) == (300, False)
    run.begin_step(KVProgress(200, 300, 0.5), 12.0)
    assert (run.remaining, run.held) == (100, 100)
    run.take_end(TAKEN, 16.0)
    assert (run.remaining, run.done) == (0, True)
    timing = run.timing
    assert (timing.started, timing.ended, timing.tokens, timing.compute_s) == (10.0, 16.0, 200, 2.0 + 0.5 * 4.0)


def test_a_prompt_is_computed_when_the_last_of_its_workers_has_its_rows(run: ServedPrompt) -> None:
    """vLLM answers later, with a token. Of the last step, three quarters were this prompt's."""
    run.begin_step(KVProgress(0, 300, 0.75), 10.0)
    run.take_end(TAKEN, 20.0)
    assert (run.timing.ended, run.timing.compute_s) == (20.0, 7.5)
    run._awaited.add(KVReport(exposed_s=2.0), 2, now=15.0)
    assert (run.timing.ended, run.timing.compute_s) == (20.0, 7.5)
    run._awaited.add(KVReport(exposed_s=0.5), 2, now=16.5)
    assert (run.timing.ended, run.timing.compute_s) == (16.0, 4.5)


def test_no_more_of_a_transfer_is_hidden_than_its_prompt_was_computed(run: ServedPrompt) -> None:
    """A worker's steps end a little later than those of the engine."""
    run.begin_step(KVProgress(0, 300, 0.5), 10.0)
    run.take_end(TAKEN, 20.0)
    run._awaited.add(KVReport(kv_bytes=70, hidden_s=5.5, exposed_s=0.5), 1, now=19.5)
    assert (run.timing.compute_s, run.sent().hidden_s) == (4.5, 4.5)


def test_a_report_that_comes_late_does_not_make_a_prompt_end_later(run: ServedPrompt) -> None:
    run.begin_step(KVProgress(0, 300, 1.0), 10.0)
    run.take_end(TAKEN, 20.0)
    run._awaited.add(KVReport(exposed_s=0.5), 1, now=30.0)
    assert (run.timing.ended, run.timing.compute_s) == (20.0, 10.0)


def test_a_step_that_several_ranks_report_is_one(run: ServedPrompt) -> None:
    for now in (10.0, 11.0):
        run.begin_step(KVProgress(0, 300, 1.0), now)
    run.take_end(TAKEN, 12.0)
    assert run.timing.compute_s == 2.0


def test_a_step_that_is_reported_after_the_answer_changes_nothing(run: ServedPrompt) -> None:
    run.take_end(TAKEN, 5.0)
    run.begin_step(KVProgress(0, 300, 1.0), 6.0)
    assert (run.timing.tokens, run.timing.compute_s, run.done) == (300, 5.0, True)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (completed(None), ModelError, "no connector of disagg"),
        (completed({"error": PeerLost("gone").to_json()}), PeerLost, "gone"),
        (ModelError("no vllm serve answers"), ModelError, "no vllm serve answers"),
        (b"nonsense", ModelError, "no answer of vllm serve"),
        (completed(OrderAnswer().to_json(), "abort"), DisaggError, "ended the request with 'abort'"),
    ],
    ids=["without connector", "order refused", "no server", "another server", "given up"],
)
def test_an_order_that_was_not_taken_fails_with_the_reason(
    run: ServedPrompt, answer: bytes | DisaggError, kind: type[DisaggError], message: str
) -> None:
    run.take_end(answer, 5.0)
    assert run.done
    with pytest.raises(kind, match=message):
        run.sent()
