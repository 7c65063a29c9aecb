"""disagg/servers/decode/planner.py: what a plan goes by."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from disagg.api.requests import DecodeBody, GenerateBody, PrefillOffer
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeTiming, EngineInfo
from disagg.engines.simulated import model as simulated_model
from disagg.servers.decode.planner import Planner
from disagg.servers.decode.prompt_kv import PromptKV
from disagg.servers.host.admission import Admission
from disagg.servers.host.request import ActiveRequest

SPARK = PrefillOffer(tokens_s=5600.0, link_bytes_s=1.1e9, splits=True, kv_version=5)
BODY = DecodeBody(model="m", tokens=(1,), prefill=SPARK)


@pytest.fixture
def info() -> EngineInfo:
    return simulated_model.load("shape:llama-3.1-8b", 32768, EngineOptions("simulated"), "m3-ultra").info


@pytest.fixture
def planner() -> Planner:
    made = Planner("auto", Admission(4, 4))
    made.speeds.add(8000, 8000 / 1500, now=time.monotonic())
    return made


def request(tokens: int = 8193) -> ActiveRequest:
    return ActiveRequest("r", Sampling(), 0.0, 100.0, tokens=list(range(tokens)))


def planned(planner: Planner, info: EngineInfo, one: ActiveRequest | None = None, *, answers: bool = False) -> int:
    return planner.plan(one or request(), PromptKV(), BODY, info, answers=answers).spans.layers


def test_while_answers_run_a_prompt_is_handed_off(planner: Planner, info: EngineInfo) -> None:
    assert 0 < planned(planner, info) < info.split.layers
    assert planned(planner, info, answers=True) == info.split.layers


def test_prompts_that_are_divided_at_the_same_time_share_this_host(planner: Planner, info: EngineInfo) -> None:
    first = request()
    alone = planned(planner, info, first)
    assert planned(planner, info) > alone, "fewer layers for this host"
    first.cleanup.close()


def test_a_prompt_that_has_ended_leaves_its_share(planner: Planner, info: EngineInfo) -> None:
    one = request()
    layers = planned(planner, info, one)
    one.cleanup.close()
    assert planned(planner, info) == layers


def test_a_prompt_that_is_computed_leaves_its_share_to_others(planner: Planner, info: EngineInfo) -> None:
    one = request()
    layers = planned(planner, info, one)
    planner.end_tail(one)
    assert planned(planner, info) == layers
    one.cleanup.close()


async def test_while_the_batch_is_full_no_prompt_is_divided(planner: Planner, info: EngineInfo) -> None:
    running = [request() for _ in range(4)]
    for one in running:
        await planner._admission.take_turn(one.share, one.cleanup)
    assert planned(planner, info) == info.split.layers
    for one in running:
        one.cleanup.close()


def test_a_request_says_otherwise_than_hosts_toml(info: EngineInfo) -> None:
    planner = Planner(12, Admission(4, 4))
    for split, layers in (("auto", 12), (20, 20), ("off", 32), (0, 0)):
        body = replace(BODY, split=split)
        assert planner.plan(request(), PromptKV(), body, info, answers=False).spans.layers == layers


def test_of_a_prompt_of_one_token_nothing_is_left_to_plan(planner: Planner, info: EngineInfo) -> None:
    terms = planner.plan(request(1), PromptKV(), BODY, info, answers=False)
    assert terms.spans.local and not terms.chunks


def test_hidden_states_that_wait_have_room_if_a_prompt_may_be_divided(planner: Planner, info: EngineInfo) -> None:
    token = 4096 * 2
    assert planner.room(BODY, 100, info) == 100 * token
    assert planner.room(BODY, 8000, info) == 4 * 512 * token and planner.room(BODY, 30000, info) == 4 * 1024 * token
    assert planner.room(replace(BODY, prefill=replace(SPARK, splits=False)), 8000, info) == 0
    assert planner.room(GenerateBody(model="m", tokens=(1,)), 8000, info) == 0


def test_rows_of_sliding_layers_have_room_wherever_a_prompt_may_come_in_chunks(planner: Planner) -> None:
    info = simulated_model.load("shape:gpt-oss-20b", 32768, EngineOptions("simulated"), "m3-ultra").info
    window, rows = 128, 12 * 2 * 8 * 64 * 2  # of half of the layers
    whole = replace(BODY, prefill=replace(SPARK, splits=False))
    assert planner.room(whole, 8000, info) == 3 * window * rows
    assert planner.room(BODY, 8000, info) == 3 * window * rows + 4 * 512 * info.split.hidden * 2
    assert planner.room(replace(BODY, prefill=replace(SPARK, kv_version=4)), 8000, info) == 0


def test_a_prompt_that_was_computed_here_shows_the_speed_of_this_host(info: EngineInfo) -> None:
    planner = Planner("auto", Admission(4, 4))
    planner.computed(PromptKV(), DecodeTiming(ingested=1.0, first_token=3.0, computed_prompt_tokens=1000))
    assert planner.speeds.latest == 500
