"""disagg/engines/vllm/served/watch.py: a request about which nothing comes fails, also one that has not begun."""

from __future__ import annotations

from math import inf
from typing import cast

import pytest

from disagg.api.sampling import Sampling
from disagg.engines.sending.runs import AnswerRun
from disagg.engines.vllm.served.calls import Call
from disagg.engines.vllm.served.watch import BEGIN_S, PREEMPTED_S, SILENCE_S, Request
from disagg.errors import ModelError
from tests.engines.vllm.served.test_prompt import NoEngine

NOTHING = -inf
"""No message about any request has come."""


@pytest.fixture
def request_() -> Request:
    run = AnswerRun(NoEngine(), 3, lambda token: None, Sampling())
    return Request(run, cast(Call, None), 100.0, BEGIN_S)


def test_a_request_that_vllm_does_not_begin_fails(request_: Request) -> None:
    request_.judge(100.0 + BEGIN_S, NOTHING)
    assert not request_.run.finished
    request_.judge(101.0 + BEGIN_S, NOTHING)
    assert request_.run.finished
    with pytest.raises(ModelError, match="no progress with the request for 61 s"):
        request_.run.step()


def test_each_message_gives_a_request_time_for_the_next_one(request_: Request) -> None:
    request_.note(150.0)
    request_.judge(150.0 + SILENCE_S, NOTHING)
    assert not request_.run.finished
    request_.judge(151.0 + SILENCE_S, NOTHING)
    assert request_.run.finished


def test_a_request_that_has_ended_may_be_silent(request_: Request) -> None:
    request_.run.finished = True
    request_.judge(1e9, NOTHING)
    assert request_.run.done


@pytest.mark.parametrize(
    ("silent_s", "others_silent_s", "fails"),
    [
        (SILENCE_S + 1, 0.0, False),  # vLLM has taken its blocks for others, and gets on with those
        (SILENCE_S + 1, SILENCE_S, False),
        (SILENCE_S + 2, SILENCE_S + 1, True),
        (PREEMPTED_S, 0.0, False),
        (PREEMPTED_S + 1, 0.0, True),
    ],
)
def test_a_request_waits_longer_while_vllm_gets_on_with_others(
    request_: Request, silent_s: float, others_silent_s: float, fails: bool
) -> None:
    request_.note(150.0)
    now = 150.0 + silent_s
    request_.judge(now, now - others_silent_s)
    assert request_.run.finished is fails
