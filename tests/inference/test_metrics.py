"""A request's figures from its caller's times and its hosts' events."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from disagg.api.events import DoneEvent, ShippedEvent, Timing
from disagg.config import EngineOptions, Host
from disagg.inference.attempt import Attempt
from disagg.inference.metrics import Trace, metrics

P = Host("p", "127.0.0.1", ("prefill",), "m", EngineOptions("simulated"), 1)
D = Host("d", "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 2)
W = Host("w", "127.0.0.1", ("whole",), "m", EngineOptions("openai"), 3)

# A hand-off of 100 prompt tokens and 11 output tokens: called at 10 s, first token at 11 s, last at 13 s.
TRACE = Trace(
    Attempt("disaggregated", D, P),
    "m",
    called=10.0,
    began=10.0,
    requested=10.002,
    slot=10.02,
    ordered=10.021,
    first_token=11.0,
    last_token=13.0,
)
DONE = DoneEvent(
    finish_reason="length",
    prompt_tokens=100,
    completion_tokens=11,
    computed_prompt_tokens=1,
    timing=Timing(
        tokenise_s=0.01, kv_wait_s=0.75, queue_s=0.02, ingest_s=0.03, compute_s=0.0, first_step_s=0.1, decode_s=2.0
    ),
)
SHIPPED = ShippedEvent(
    prompt_tokens=100,
    computed_tokens=99,
    kv_bytes=1000,
    kv_wire="as-is",
    tokenise_s=0.01,
    queue_s=0.05,
    compute_s=0.5,
    hidden_transfer_s=0.3,
    exposed_transfer_s=0.15,
)


def shipped(**changes: Any) -> ShippedEvent:
    return msgspec.structs.replace(SHIPPED, **changes)


def test_the_parts_add_up_to_ttft() -> None:
    figures = metrics(TRACE, DONE, SHIPPED)
    assert figures.ttft == pytest.approx(1.0)
    assert figures.ttft_parts.total == pytest.approx(1.0)
    assert asdict(figures.ttft_parts) == pytest.approx(
        {
            "failed_attempts": 0.0,
            "loading": 0.0,
            "client": 0.003,
            "queue": 0.07,
            "tokenise": 0.02,
            "prefill": 0.5,
            "tail": 0.0,
            "exposed_transfer": 0.15,
            "ingest": 0.03,
            "first_step": 0.10,
            "whole": 0.0,
            "network": 0.127,
        }
    )


def test_an_acknowledgement_that_arrives_late_is_not_counted_as_transfer() -> None:
    """The decode host had accepted the KV 0.75 s after the slot, however late its acknowledgement arrived."""
    figures = metrics(TRACE, DONE, shipped(exposed_transfer_s=0.9))
    assert figures.exposed_transfer == pytest.approx(0.75 - 0.56 - 0.001)
    assert figures.ttft_parts.network >= 0


def test_kv_that_was_accepted_before_the_stated_end_of_compute_is_not_waited_for_any_longer() -> None:
    """No part is negative: the prompt was computed by then, whenever its host learnt of that."""
    figures = metrics(TRACE, DONE, shipped(compute_s=0.8, exposed_transfer_s=0.0))
    assert figures.exposed_transfer == 0.0
    assert figures.ttft_parts.prefill == pytest.approx(0.75 - 0.06 - 0.001)
    assert figures.prefill_time == 0.8
    assert figures.ttft_parts.network >= 0
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)


def test_a_slow_caller_is_neither_transfer_nor_network() -> None:
    """50 ms for connecting to the decode host, 80 ms for the prefill host."""
    slow = replace(TRACE, requested=10.05, slot=10.07, ordered=10.15)
    figures = metrics(slow, DONE, shipped(exposed_transfer_s=0.9))
    assert figures.ttft_parts.client == pytest.approx(0.13)
    assert figures.exposed_transfer == pytest.approx(0.75 - 0.56 - 0.08)
    assert figures.ttft_parts.network >= 0
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)


def test_the_form_of_the_kv_is_what_the_decode_host_reports() -> None:
    assert metrics(TRACE, DONE, SHIPPED).kv_wire is None
    assert metrics(TRACE, msgspec.structs.replace(DONE, kv_wire="int8-g64"), SHIPPED).kv_wire == "int8-g64"


def test_speeds_are_tokens_over_time() -> None:
    figures = metrics(TRACE, DONE, SHIPPED)
    assert figures.prefill_speed == pytest.approx(99 / 0.5)
    assert figures.decode_speed == pytest.approx(5.0)
    assert figures.decode_time == pytest.approx(2.0)
    assert figures.total_tokens == 111


def test_what_was_not_computed_has_no_speed() -> None:
    one_token = msgspec.structs.replace(DONE, completion_tokens=1)
    figures = metrics(TRACE, one_token, shipped(computed_tokens=0, compute_s=0.0001))
    assert (figures.prefill_speed, figures.decode_speed) == (None, None)


def test_without_the_prefill_hosts_figures_its_share_is_the_networks() -> None:
    figures = metrics(TRACE, DONE)
    assert (figures.prefill_speed, figures.kv_bytes, figures.ttft_parts.prefill) == (None, 0, 0.0)
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)


def test_time_lost_on_hosts_that_failed_is_its_own_part() -> None:
    figures = metrics(replace(TRACE, began=10.05, requested=10.052), DONE, SHIPPED)
    assert figures.ttft_parts.failed_attempts == pytest.approx(0.05)
    assert figures.ttft_parts.client == pytest.approx(0.003)
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)


def test_the_time_in_which_the_model_was_loaded_is_its_own_part() -> None:
    figures = metrics(replace(TRACE, began=10.05, requested=10.052, loading_s=0.04), DONE, SHIPPED)
    assert (figures.ttft_parts.loading, figures.ttft_parts.failed_attempts) == pytest.approx((0.04, 0.01))
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)


def test_the_parts_of_a_prompt_that_both_hosts_computed_are_head_tail_and_exposed_transfer() -> None:
    timing = msgspec.structs.replace(DONE.timing, kv_wait_s=0.65, ingest_s=0.02, tail_s=0.11, tail_compute_s=0.4)
    done = msgspec.structs.replace(DONE, timing=timing, layers=24)
    figures = metrics(TRACE, done, shipped(compute_s=0.4, starved_s=0.08, exposed_transfer_s=0.06, layers=24))
    parts = figures.ttft_parts
    assert (parts.prefill, parts.tail, parts.exposed_transfer) == pytest.approx((0.4, 0.19, 0.06))
    assert parts.total == pytest.approx(figures.ttft) and parts.network > 0
    assert figures.prefill_time == pytest.approx(0.4 + 0.19) and figures.layers == 24
    assert figures.prefill_speed == pytest.approx(99 / 0.59)


def test_a_prefill_host_that_failed_in_mid_prompt_and_the_host_that_went_on_add_up() -> None:
    """The wait for its KV is a failed attempt's; what followed is the decode host's compute."""
    timing = Timing(tokenise_s=0.01, kv_wait_s=0.4, ingest_s=0.03, compute_s=0.5, tail_compute_s=0.1)
    done = msgspec.structs.replace(DONE, timing=timing, layers=24, resumed_at=64, computed_prompt_tokens=36)
    figures = metrics(TRACE, done)
    parts = figures.ttft_parts
    assert (parts.failed_attempts, parts.prefill, parts.tail) == pytest.approx((0.4, 0.5, 0.0))
    assert parts.total == pytest.approx(figures.ttft) and parts.network > 0
    assert figures.resumed_at == 64 and figures.prefill_time == 0.5


def test_the_time_of_a_prefill_host_that_another_one_replaced_is_a_failed_attempts() -> None:
    trace = replace(TRACE, slot=10.2, ordered=10.201, replaced_s=0.18)
    timing = msgspec.structs.replace(DONE.timing, kv_wait_s=0.6)
    figures = metrics(trace, msgspec.structs.replace(DONE, timing=timing), shipped(compute_s=0.4))
    assert figures.ttft_parts.failed_attempts == pytest.approx(0.18) and figures.ttft_parts.network > 0
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)


def resumed(opening: Trace, tokens: int = 3) -> Trace:
    """An attempt on another host, which goes on at 11.5 s."""
    following = replace(TRACE, attempt=Attempt("decode-alone", D, None), began=11.5, requested=11.502)
    following.follow(opening, tokens)
    return following


def test_the_parts_of_an_answer_that_another_host_ended_are_those_of_the_attempt_with_its_first_token() -> None:
    """The timing of the host that was lost is part of the network's share."""
    opening = replace(TRACE, began=10.05, requested=10.052, shipped=SHIPPED)
    figures = metrics(resumed(opening), DONE)
    assert figures.ttft == pytest.approx(1.0) and figures.resumed_tokens == 3
    assert asdict(figures.ttft_parts) == pytest.approx(
        {
            "failed_attempts": 0.05,
            "loading": 0.0,
            "client": 0.003,
            "queue": 0.05,
            "tokenise": 0.01,
            "prefill": 0.5,
            "tail": 0.0,
            "exposed_transfer": 0.15,
            "ingest": 0.0,
            "first_step": 0.0,
            "whole": 0.0,
            "network": 0.237,
        }
    )


def test_the_transfer_of_a_lost_host_ended_before_its_first_token() -> None:
    opening = replace(TRACE, shipped=shipped(exposed_transfer_s=0.9))
    assert metrics(resumed(opening), DONE).ttft_parts.exposed_transfer == pytest.approx(0.98 - 0.56 - 0.001)


def test_without_any_figures_of_the_lost_hosts_their_share_is_the_networks() -> None:
    figures = metrics(resumed(TRACE), DONE)
    assert figures.ttft_parts.network == pytest.approx(0.997) and figures.ttft_parts.failed_attempts == 0.0


def test_the_first_of_three_attempts_has_the_parts_if_it_brought_the_first_token() -> None:
    second = resumed(replace(TRACE, shipped=SHIPPED))
    assert metrics(resumed(second, 7), DONE).ttft_parts == metrics(second, DONE).ttft_parts


def test_the_figures_of_a_resumed_answer_are_those_of_all_its_attempts() -> None:
    opening = replace(TRACE, shipped=SHIPPED)
    second = replace(resumed(opening), shipped=shipped(exposed_transfer_s=0.02))
    last = resumed(second, 7)
    last.last_token = 14.0
    alone, figures = metrics(TRACE, DONE, SHIPPED), metrics(last, DONE, SHIPPED)
    assert figures.kv_bytes == 3 * SHIPPED.kv_bytes
    assert figures.prefill_time == pytest.approx(3 * alone.prefill_time)
    assert figures.prefill_speed == pytest.approx(alone.prefill_speed), "of three times as many tokens"
    assert figures.hidden_transfer == pytest.approx(3 * SHIPPED.hidden_transfer_s)
    assert figures.exposed_transfer == pytest.approx(
        metrics(opening, DONE, SHIPPED).exposed_transfer * 2 + 0.02, abs=0.1
    )
    assert figures.decode_time == pytest.approx(14.0 - TRACE.first_token)
    assert figures.decode_speed == pytest.approx(10 / figures.decode_time)


def test_an_answer_that_its_decode_host_computes_after_a_failure_has_the_prefill_of_both() -> None:
    local = msgspec.structs.replace(DONE, computed_prompt_tokens=100, timing=Timing(compute_s=2.0))
    figures = metrics(resumed(replace(TRACE, shipped=SHIPPED)), local)
    assert figures.prefill_time == pytest.approx(SHIPPED.compute_s + 2.0)
    assert figures.prefill_speed == pytest.approx((SHIPPED.computed_tokens + 100) / figures.prefill_time)
    assert figures.kv_bytes == SHIPPED.kv_bytes


@pytest.mark.parametrize(("last_token", "speed"), [(13.0, 5.0), (11.0002, None)])
def test_a_whole_answer_that_arrives_in_one_burst_has_no_decode_speed(last_token: float, speed: float | None) -> None:
    trace = replace(TRACE, attempt=Attempt("whole", W, None), last_token=last_token)
    figures = metrics(trace, DONE)
    assert figures.decode_speed == speed and bool(figures.decode_time) == bool(speed)


@pytest.mark.parametrize(("held", "known"), [(99, False), (98, True)])
def test_a_prompt_of_which_all_but_the_last_token_was_held_has_no_prefill_speed(held: int, known: bool) -> None:
    """A pass over one token is a decode step."""
    local = msgspec.structs.replace(DONE, held_tokens=held, local="held", timing=Timing(compute_s=0.08))
    assert (metrics(TRACE, local).prefill_speed is not None) is known
