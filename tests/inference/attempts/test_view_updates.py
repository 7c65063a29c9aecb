"""disagg/inference/attempts/view_updates.py: what the view shows of a host while a long answer still runs."""

from __future__ import annotations

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import ModelError, ServerUnavailable
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import AttemptOutcome
from disagg.inference.attempts.retry import Failure
from disagg.inference.attempts.view_updates import ViewUpdates
from disagg.inference.hosts.breaker import Breaker
from disagg.inference.hosts.view import FleetView, HostView
from tests.inference.scripted import done
from tests.inference.test_queue_exit import NOTHING_SHIPPED

P = Host("p", "127.0.0.1", ("prefill",), "m", EngineOptions("simulated"), 1)
D = Host("d", "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 2)
HANDED_OFF = Attempt("disaggregated", D, P)
EJECTED = Breaker(failures=3, ejections=2, until=-1.0)
ANSWERED = AttemptOutcome(done({"tokens": [1], "sampling": {"max_tokens": 1}}))


@pytest.fixture
def view() -> FleetView:
    """Both hosts were ejected a while ago."""
    return FleetView({name: HostView("up", breaker=EJECTED) for name in "pd"})


def test_while_an_answer_is_written_others_may_ask_its_host(view: FleetView) -> None:
    updates = ViewUpdates(view, HANDED_OFF, 100)
    assert view.of("d").obstacle(0.0), "one request finds out"
    updates.first_token()
    assert not view.of("d").obstacle(0.0) and view.of("d").outstanding == 1
    assert view.of("p").obstacle(0.0), "the prefill host has not shown anything yet"


def test_a_prompt_is_no_longer_ahead_of_others_when_its_kv_has_been_sent(view: FleetView) -> None:
    updates = ViewUpdates(view, HANDED_OFF, 100)
    assert view.of("p").tokens_ahead == view.of("d").tokens_ahead == 100
    updates.shipped("p")
    other = ViewUpdates(view, HANDED_OFF, 7)
    updates.ended(None, ANSWERED._replace(shipped=NOTHING_SHIPPED))
    assert (view.of("p").outstanding, view.of("p").tokens_ahead) == (1, 7), "the end of the answer changes nothing"
    other.ended(None, ANSWERED)
    assert view.of("p").outstanding == view.of("d").outstanding == 0


def test_a_prefill_host_that_was_not_asked_has_not_succeeded(view: FleetView) -> None:
    updates = ViewUpdates(view, HANDED_OFF, 100)
    updates.not_asked("p")
    assert view.of("p") == HostView("up", breaker=EJECTED), "free at once, and its failures are remembered"
    updates.ended(None, ANSWERED)
    assert view.of("p").breaker == EJECTED and view.of("d").breaker == Breaker()


def test_the_figures_of_a_hand_off_show_that_its_prefill_host_works(view: FleetView) -> None:
    ViewUpdates(view, HANDED_OFF, 100).ended(None, ANSWERED._replace(shipped=NOTHING_SHIPPED))
    assert view.of("p").breaker == view.of("d").breaker == Breaker()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_only_the_host_to_blame_has_failed(view: FleetView, side: str) -> None:
    failure = Failure(HANDED_OFF, "prefill" if side == "prefill" else "decode", ServerUnavailable(""))
    ViewUpdates(view, HANDED_OFF, 100).ended(failure, None)
    assert {name: view.of(name).breaker.ejections for name in "pd"} == {
        "p": 3 if side == "prefill" else 2,
        "d": 3 if side == "decode" else 2,
    }
    assert view.of("p").outstanding == view.of("d").outstanding == 0


def test_a_cancelled_request_says_nothing_about_its_hosts(view: FleetView) -> None:
    ViewUpdates(view, HANDED_OFF, 100).ended(None, None)
    assert view.of("p") == view.of("d") == HostView("up", breaker=EJECTED)


def test_a_prefill_host_alone_is_the_one_that_answers(view: FleetView) -> None:
    updates = ViewUpdates(view, Attempt("prefill-alone", None, P), 100)
    updates.first_token()
    assert not view.of("p").obstacle(0.0)
    updates.ended(Failure(Attempt("prefill-alone", None, P), "prefill", ModelError("")), None)
    assert view.of("p").breaker.ejections == 3
