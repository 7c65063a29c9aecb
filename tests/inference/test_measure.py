"""From what two hosts and the caller saw to one request's figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from disagg.inference.measure import Trace, metrics


def trace(began: float = 10.0, **changes: Any) -> Trace:
    """A hand-off of 100 prompt tokens and 11 output tokens, sent at 10 s, first token at 11 s, last at 13 s."""
    timing = {
        "tokenise_s": 0.01, "kv_wait_s": 0.75, "queue_s": 0.02, "ingest_s": 0.03, "compute_s": 0.0, "first_step_s": 0.1,
        "decode_s": 2.0,
    }  # fmt: skip
    ship = {
        "tokenise_s": 0.01, "queue_s": 0.05, "compute_s": 0.5, "hidden_transfer_s": 0.3, "exposed_transfer_s": 0.15,
        "kv_bytes": 1000,
    }  # fmt: skip
    ship.update(changes)
    done = {"timing": timing, "prompt_tokens": 100, "completion_tokens": 11, "computed_prompt_tokens": 1}
    return Trace("disaggregated", "m", 10.0, began, "p", "d", 11.0, 13.0, {}, ship, done)


def test_the_parts_add_up_to_ttft() -> None:
    figures = metrics(trace())
    assert figures.ttft == pytest.approx(1.0)
    assert figures.ttft_parts.total == pytest.approx(1.0)
    assert asdict(figures.ttft_parts) == pytest.approx(
        {
            "failed_attempts": 0.0,
            "queue": 0.07,
            "tokenise": 0.02,
            "prefill": 0.5,
            "exposed_transfer": 0.15,
            "ingest": 0.03,
            "first_step": 0.10,
            "network": 0.13,
        }
    )


def test_an_acknowledgement_that_comes_back_late_is_not_counted_as_transfer() -> None:
    """The decode host had accepted the KV 0.75 s after the slot, however late the prefill host heard of it."""
    figures = metrics(trace(exposed_transfer_s=0.9))
    assert figures.exposed_transfer == pytest.approx(0.75 - 0.56)
    assert figures.ttft_parts.network >= 0


def test_the_form_in_which_the_kv_came_is_what_the_decode_host_says() -> None:
    seen = trace()
    assert metrics(seen).kv_wire is None
    seen.done = {**seen.done, "kv_wire": "int8-g64"}
    assert metrics(seen).kv_wire == "int8-g64"


def test_speeds_are_tokens_over_time() -> None:
    figures = metrics(trace())
    assert figures.prefill_speed == pytest.approx(200.0)
    assert figures.decode_speed == pytest.approx(5.0)
    assert figures.decode_time == pytest.approx(2.0)
    assert figures.total_tokens == 111


def test_time_lost_on_hosts_that_failed_is_its_own_part() -> None:
    figures = metrics(trace(began=10.12))
    assert figures.ttft_parts.failed_attempts == pytest.approx(0.12)
    assert figures.ttft_parts.network == pytest.approx(0.01)
    assert figures.ttft_parts.total == pytest.approx(figures.ttft)
