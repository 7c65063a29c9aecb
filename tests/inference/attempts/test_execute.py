"""Retries, other hosts and fallbacks: one host misbehaves on purpose, the others are real."""

from __future__ import annotations

import dataclasses

import pytest

from disagg.errors import HandoffError, ServerUnavailable
from disagg.inference.client import Client
from disagg.inference.policy import RetryPolicy, Timeouts
from tests.fleets import TOKEN, RunningFleet
from tests.inference.fake_hosts import misbehaving, with_first
from tests.ports import free_ports

PROMPT = [9 + i for i in range(60)]  # salted, so that no test finds it held


@pytest.mark.parametrize("kind", ["overloaded", "foreign"])
def test_a_prefill_host_that_fails_is_followed_by_another(tiny_fleet: RunningFleet, kind: str) -> None:
    real = tiny_fleet.fleet.hosts["tiny-prefill"]
    with (
        misbehaving(kind, real) as port,
        Client(with_first(tiny_fleet.fleet, real.name, port), token=TOKEN, start=0) as client,
    ):
        answer = client.generate("tiny", tokens=PROMPT, cache_salt=f"after {kind}", local_prefill=False, max_tokens=3)
    assert (answer.metrics.method, answer.metrics.prefill_server) == ("disaggregated", "tiny-prefill")
    assert answer.metrics.ttft_parts.failed_attempts > 0
    assert answer.warnings == ()


def test_the_first_prompt_of_a_client_is_divided_as_asked(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.client() as client:
        answer = client.generate("tiny", tokens=PROMPT, cache_salt="divided first", split=1, max_tokens=3)
    assert (answer.metrics.method, answer.metrics.layers) == ("disaggregated", 1)


def test_hosts_that_state_no_load_hold_the_first_prompt_up_for_a_moment_only(tiny_fleet: RunningFleet) -> None:
    real = tiny_fleet.fleet.hosts["tiny-prefill"]
    with misbehaving("foreign", real) as port:
        foreign = dataclasses.replace(real, port=port)
        fleet = dataclasses.replace(tiny_fleet.fleet, hosts={**tiny_fleet.fleet.hosts, real.name: foreign})
        with Client(fleet, token=TOKEN) as client:
            answer = client.generate("tiny", tokens=PROMPT, cache_salt="no load", split=1, max_tokens=3)
    assert (answer.metrics.method, answer.metrics.layers) == ("fallback", None)


def test_without_fallback_a_failed_hand_off_is_an_error(tiny_fleet: RunningFleet) -> None:
    real = tiny_fleet.fleet.hosts["tiny-prefill"]
    with misbehaving("foreign", real) as port:
        foreign = dataclasses.replace(real, port=port)
        fleet = dataclasses.replace(tiny_fleet.fleet, hosts={**tiny_fleet.fleet.hosts, real.name: foreign})
        with Client(fleet, token=TOKEN) as client, pytest.raises(HandoffError, match="the KV hand-off failed"):
            client.generate("tiny", tokens=PROMPT, cache_salt="no fallback", max_tokens=3, on_kv_failure="fail")


def test_an_answer_that_is_complete_survives_the_loss_of_its_prefill_figures(tiny_fleet: RunningFleet) -> None:
    real = tiny_fleet.fleet.hosts["tiny-prefill"]
    with misbehaving("forgetful", real) as port:
        forgetful = dataclasses.replace(real, port=port)
        fleet = dataclasses.replace(tiny_fleet.fleet, hosts={**tiny_fleet.fleet.hosts, real.name: forgetful})
        with Client(fleet, token=TOKEN) as client, tiny_fleet.client() as plain:
            answer = client.generate("tiny", tokens=PROMPT, cache_salt="figures lost", max_tokens=30)
            expected = plain.generate("tiny", tokens=PROMPT, cache_salt="figures", max_tokens=30)
    assert answer.text == expected.text


def test_a_decode_host_that_is_not_there_is_followed_by_another(tiny_fleet: RunningFleet) -> None:
    (port,) = free_ports(1)
    with Client(with_first(tiny_fleet.fleet, "tiny-decode", port), token=TOKEN, start=0) as client:
        answer = client.generate("tiny", tokens=PROMPT, cache_salt="not there", local_prefill=False, max_tokens=3)
    assert (answer.metrics.method, answer.metrics.decode_server) == ("disaggregated", "tiny-decode")
    assert "no server answers" in answer.warnings[0] and "asking tiny-decode" in answer.warnings[0]


def test_a_decode_host_that_breaks_off_is_one_clear_error(tiny_fleet: RunningFleet) -> None:
    real = tiny_fleet.fleet.hosts["tiny-decode"]
    with misbehaving("half", real) as port:
        half = dataclasses.replace(real, port=port)
        fleet = dataclasses.replace(tiny_fleet.fleet, hosts={"d": half})
        policy = RetryPolicy(timeouts=Timeouts(none_up=0.2))
        with (
            Client(fleet, token=TOKEN, policy=policy) as client,
            pytest.raises(ServerUnavailable, match="Decode server unavailable"),
        ):
            client.generate("tiny", tokens=PROMPT, cache_salt="half", max_tokens=3)
