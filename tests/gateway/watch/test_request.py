"""Which events of a request observers get, and that none of them can fail it or hold it up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from disagg.errors import ServerUnavailable
from disagg.gateway.dialects.base import GatewayRequest, Head
from disagg.gateway.dialects.problems import Problem, problem_of
from disagg.gateway.watch.entry import entry_of_end
from disagg.gateway.watch.request import SETTLE_S, ObservedRequest, Observer, Observers
from disagg.inference.types import Stage
from tests.deadlines import ends_by_itself
from tests.gateway.fake_client import completion

PREFILL = Stage("prefill", "disaggregated", "p", "d", 100, 60)
GONE = problem_of(ServerUnavailable("gone"))


class Notes(Observer):
    """An observer that keeps what it is told: of a method without arguments, and of tokens, how many."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.request: ObservedRequest

    def accepted(self, request: ObservedRequest) -> None:
        self.request = request
        self.events.append("accepted")

    def generated(self, request: ObservedRequest, choice: int, tokens: int) -> None:
        first = "first " if request.answers[choice].gap is None else ""
        self.events.append(f"{first}{tokens}")

    def completed(self, request: ObservedRequest, choice: int) -> None:
        self.events.append("completed")

    def ended(self, request: ObservedRequest) -> None:
        self.events.append("ended")


class Broken(Observer):
    def accepted(self, request: ObservedRequest) -> None:
        raise KeyError("a bug")

    def ended(self, request: ObservedRequest) -> None:
        raise KeyError("a bug")


def head(n: int = 1) -> Head:
    return Head(GatewayRequest(model="m", prompts=({"prompt": "the prompt"},), n=n), "r1", 5.0)


def test_an_observer_gets_the_events_of_a_request_in_their_order() -> None:
    notes = Notes()
    observed = Observers([notes]).accept(head(), "openai-chat", "m", "editor")
    observed.entered(0, PREFILL)
    assert (observed.phase, observed.waiting) == ("prefill", False)
    observed.generated(0, 0)  # a text without a token of its own
    observed.generated(0, 1)
    observed.generated(0, 2)
    observed.completed(0, completion("one two three"))
    observed.ended()
    observed.ended(GONE)
    assert notes.events == ["accepted", "first 1", "2", "completed", "ended"]
    request = notes.request
    assert request.key == "editor" and request.prompts is None
    assert request.answers[0].stage == PREFILL and request.answers[0].completion is not None
    assert request.state == "ok" and request.tokens == 3


def test_a_prompt_and_a_token_are_charged_once() -> None:
    charged: list[int] = []
    observed = Observers([]).accept(head(2), "openai-chat", "m", None, charge=charged.append)
    for choice in range(2):
        observed.entered(choice, PREFILL)
        observed.generated(choice, 3)
    observed.completed(0, completion("one two three", prompt_tokens=100))
    whole = completion("four words of text")
    observed.completed(1, replace(whole, metrics=replace(whole.metrics, method="whole")))  # one was not stated before
    assert charged == [100, 3, 3, 1] and (observed.prompt_tokens, observed.tokens) == (100, 7)


@pytest.mark.parametrize(
    ("complete", "problem", "state"),
    [
        (2, None, "ok"),  # also if the caller left after the last token
        (1, None, "cancelled"),
        (1, GONE, "failed"),
    ],
)
def test_how_a_request_with_two_answers_ended(complete: int, problem: Problem | None, state: str) -> None:
    observed = Observers([]).accept(head(2), "openai-chat", "m", None)
    observed.generated(1, 7)
    for choice in range(complete):
        observed.completed(choice, completion("x"))
    observed.ended(problem)
    entry = entry_of_end(observed)
    assert observed.state == state
    assert (entry.completion_tokens if entry else 0) == (0 if complete == 2 else 7)


def test_an_answer_that_was_cut_has_the_time_of_its_first_text_and_one_without_any_has_none() -> None:
    entries = []
    for arrived in (True, False):
        request = Observers([]).accept(head(2), "openai-chat", "m", None)
        request.generated(0, 1)
        request.completed(0, completion("x"))
        if arrived:
            request.generated(1, 1)
        request.ended()
        entries.append(entry_of_end(request))
    cut, silent = entries
    assert cut is not None and cut.ttft is not None and 0 <= cut.ttft <= cut.total_time
    assert silent is not None and silent.ttft is None


def test_an_observer_with_a_bug_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    observed = Observers([Broken(), notes]).accept(head(), "openai-chat", "m", None)
    observed.ended()
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
    assert notes.request.prompts == ("the prompt",)
