"""Which events of a request observers get, and that none of them can fail it or hold it up."""

from __future__ import annotations

import asyncio

import pytest

from disagg.errors import ServerUnavailable
from disagg.gateway.dialects.base import GatewayRequest, Head
from disagg.gateway.dialects.problems import problem_of
from disagg.gateway.watch.events import Accepted, Completed, Ended, Generated, RequestEvent, StageEntered
from disagg.gateway.watch.observers import SETTLE_S, Observers
from disagg.inference.types import Stage
from tests.deadlines import ends_by_itself
from tests.gateway.fake_client import completion

PREFILL = Stage("prefill", "disaggregated", "p", "d", 100, 60)
GONE = problem_of(ServerUnavailable("gone"))


class Notes:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[RequestEvent] = []

    def notify(self, event: RequestEvent) -> None:
        self.events.append(event)


class Broken:
    def notify(self, event: RequestEvent) -> None:
        raise KeyError("a bug")


def head(n: int = 1) -> Head:
    return Head(GatewayRequest(model="m", prompts=({"prompt": "the prompt"},), n=n), "r1", 5.0)


def test_an_observer_gets_the_events_of_a_request_in_their_order() -> None:
    notes = Notes()
    observed = Observers([notes]).accept(head(), "openai-chat", "m", "editor")
    observed.entered(0, PREFILL)
    observed.generated(0, 0)  # a text without a token of its own
    observed.generated(0, 1)
    observed.generated(0, 2)
    observed.completed(0, completion("one two three"))
    observed.ended(None, cancelled=False)
    observed.ended(None, cancelled=True)
    assert [type(event) for event in notes.events] == [Accepted, StageEntered, Generated, Generated, Completed, Ended]
    accepted, _, first, second, done, end = notes.events
    assert isinstance(accepted, Accepted) and accepted.key == "editor" and accepted.prompts is None
    assert isinstance(first, Generated) and first.first and isinstance(second, Generated) and not second.first
    assert isinstance(done, Completed) and done.stage == PREFILL
    assert isinstance(end, Ended) and end.state == "ok"


@pytest.mark.parametrize(
    ("complete", "problem", "cancelled", "state"),
    [
        (2, None, False, "ok"),
        (2, None, True, "ok"),  # the caller left after the last token
        (1, None, True, "cancelled"),
        (1, GONE, False, "failed"),
    ],
)
def test_how_a_request_with_two_answers_ended(complete: int, problem: object, cancelled: bool, state: str) -> None:
    notes = Notes()
    observed = Observers([notes]).accept(head(2), "openai-chat", "m", None)
    observed.generated(1, 7)
    for choice in range(complete):
        observed.completed(choice, completion("x"))
    observed.ended(problem if problem is None else GONE, cancelled=cancelled)
    end = notes.events[-1]
    assert isinstance(end, Ended) and (end.state, end.tokens) == (state, 0 if complete == 2 else 7)


def test_an_answer_that_was_cut_has_the_time_of_its_first_text_and_one_without_any_has_none() -> None:
    notes = Notes()
    for arrived in (True, False):
        request = Observers([notes]).accept(head(2), "openai-chat", "m", None)
        request.generated(0, 1)
        request.completed(0, completion("x"))
        if arrived:
            request.generated(1, 1)
        request.ended(None, cancelled=True)
    cut, silent = (event for event in notes.events if isinstance(event, Ended))
    assert cut.ttft is not None and 0 <= cut.ttft <= cut.seconds
    assert silent.ttft is None


def test_an_observer_with_a_bug_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    observed = Observers([Broken(), notes]).accept(head(), "openai-chat", "m", None)
    observed.ended(None, cancelled=True)
    assert len(notes.events) == 2
    assert caplog.text.count("observer_failed: Broken") == 1


async def test_a_history_that_does_not_settle_delays_the_end_of_an_answer_only_shortly() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    observed = Observers([], never).accept(head(), "openai-chat", "m", None)
    with ends_by_itself(50 * SETTLE_S):
        await observed.settle()


def test_texts_are_passed_on_only_if_they_are_to_be_kept() -> None:
    notes = Notes()
    Observers([notes], keep_text=True).accept(head(), "openai-chat", "m", None)
    assert isinstance(notes.events[0], Accepted) and notes.events[0].prompts == ("the prompt",)
