"""disagg/servers/host/request.py: a request's deadline, its cleanup, and its parts of the time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from disagg.api.events import Timing
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeTiming
from disagg.errors import DeadlineExceeded
from disagg.kv.receive.tickets import IssuedTicket
from disagg.servers.host.request import ActiveRequest, Phase

ENGINE = DecodeTiming(submitted=20.0, started=21.0, ingested=24.0, first_token=28.0)


def request(deadline: float = 1e9) -> ActiveRequest:
    return ActiveRequest("r", Sampling(), arrived=10.0, deadline=deadline, tokenised=12.0, slot_sent=13.0)


def test_with_kv_the_parts_are_wait_queue_ingest_and_first_step() -> None:
    parts = request().timing(2.0, ENGINE, kv_accepted=18.0, decode_s=5.0)
    assert parts == Timing(tokenise_s=2.0, kv_wait_s=5.0, queue_s=3.0, ingest_s=3.0, first_step_s=4.0, decode_s=5.0)
    assert 12.0 + sum((parts.kv_wait_s, parts.queue_s, parts.ingest_s, parts.first_step_s)) + 1.0 == ENGINE.first_token


@pytest.mark.parametrize(("accepted", "queue_s"), [(22.0, 0.0), (20.5, 0.5)])
def test_of_a_divided_prompt_only_the_wait_after_the_last_kv_is_a_queue(accepted: float, queue_s: float) -> None:
    """Its turn came, and its layers here were computed, while the others arrived."""
    engine = replace(ENGINE, tail_s=1.5, tail_compute_s=3.0)
    parts = request().timing(2.0, engine, kv_accepted=accepted, decode_s=5.0)
    assert (parts.queue_s, parts.tail_s, parts.tail_compute_s) == (queue_s, 1.5, 3.0)
    whole = parts.kv_wait_s + parts.queue_s + parts.tail_s + parts.ingest_s + parts.first_step_s
    assert 13.0 + whole == ENGINE.first_token


def test_what_this_host_computes_after_a_failure_is_compute() -> None:
    parts = request().timing(0.0, ENGINE, kv_accepted=22.0, decode_s=5.0, resumed=True)
    assert (parts.compute_s, parts.first_step_s, parts.ingest_s) == (4.0, 0.0, 2.0)


def test_without_kv_the_first_step_is_part_of_the_prompts_compute() -> None:
    parts = request().timing(2.0, ENGINE, kv_accepted=None, decode_s=5.0)
    assert parts == Timing(tokenise_s=2.0, queue_s=3.0, compute_s=4.0, decode_s=5.0)


async def test_what_is_not_done_by_the_deadline_is_named() -> None:
    late = request(deadline=time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded, match="the KV had not arrived by the request's deadline"):
        await late.within_deadline(asyncio.get_running_loop().create_future(), "the KV had not arrived")


@pytest.mark.parametrize(
    ("phase", "state", "stated"),
    [
        ("queued", None, "queued"),
        ("waiting for KV", "issued", "waiting for KV"),
        ("waiting for KV", "claimed", "receiving KV"),
        ("generating", "done", "generating"),
    ],
)
def test_it_is_stated_when_its_kv_begins_to_arrive(phase: Phase, state: str | None, stated: str) -> None:
    one = request()
    one.phase, one.slot = phase, cast(IssuedTicket, SimpleNamespace(state=state)) if state else None
    assert one.stated_phase == stated


def test_two_requests_of_one_id_have_keys_of_their_own() -> None:
    assert request().key != request().key


def test_cleanup_releases_in_reverse_order() -> None:
    released: list[str] = []
    one = request()
    for what in ("place", "ticket", "row"):
        one.cleanup.callback(released.append, what)
    one.cleanup.close()
    assert released == ["row", "ticket", "place"]
