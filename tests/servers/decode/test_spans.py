"""disagg/servers/decode/spans.py: who computes which layers of a prompt, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from disagg.api.layout import LayerLayout, Layout, SplitLayout, StateTensor, uniform
from disagg.api.requests import PrefillOffer, PromptSpeed
from disagg.errors import RequestError
from disagg.servers.decode.audits import Fading
from disagg.servers.decode.spans import (
    LONG_TOKENS,
    SPEED_WEIGHT,
    UNMEASURED_TOKENS,
    Here,
    Rest,
    Span,
    Speeds,
    in_chunks,
    plan,
)

LAYOUT = uniform((None,) * 32, 8, 128, "bfloat16")
SPLIT = SplitLayout(32, tuple(range(32)), 4096)
MAC = Here(LAYOUT, SPLIT, 1500.0, 1500.0)
"""An M3 Ultra with Llama-3.1-8B, and a Spark in front of it by 10 GbE."""
SPARK = PrefillOffer(tokens_s=5600.0, link_bytes_s=1.1e9, splits=True, kv_version=5)
ONLY_HAND_OFF = PrefillOffer(tokens_s=5000, link_bytes_s=1e9)


def planned(tokens: int, offer: PrefillOffer | None = SPARK, here: Here = MAC, **rest: Any) -> tuple[int, str]:
    """k and the reason."""
    made = plan(Rest(0, tokens, **rest), offer, here)
    return made.layers, made.reason


@pytest.mark.parametrize(
    ("tokens", "offer", "tokens_s", "layers", "reason"),
    [
        (12, None, 1000.0, 32, "no prefill host was offered"),
        (0, ONLY_HAND_OFF, None, 0, "no token but the last is left to compute"),
        (0, None, None, 0, "no token but the last is left to compute"),
        (UNMEASURED_TOKENS, ONLY_HAND_OFF, None, 0, "32 tokens left to compute; until its speed is measured"),
        (UNMEASURED_TOKENS + 1, ONLY_HAND_OFF, None, 32, "33 tokens left to compute; until its speed is measured"),
        (13, ONLY_HAND_OFF, 1000.0, 32, "13 tokens left to compute: 13 ms here, 13 ms on a prefill host"),
        (11, ONLY_HAND_OFF, 1000.0, 0, "11 tokens left to compute: 11 ms here, 12 ms on a prefill host"),
        (1, ONLY_HAND_OFF, 1720.0, 0, "1 token left to compute: 0.58 ms here, 10 ms on a prefill host"),
        (1000, ONLY_HAND_OFF, 1000.0, 32, "1,000 tokens left to compute: 1.00 s here, 210 ms on a prefill host"),
        (
            1000,
            PrefillOffer(tokens_s=5000, link_bytes_s=6e7),
            1000.0,
            0,
            "1,000 tokens left to compute: 1.00 s here, 2",
        ),
        (1000, PrefillOffer(wait_s=3, tokens_s=5000), 1000.0, 0, "1,000 tokens left to compute: 1.00 s here, 3.21 s"),
    ],
)
def test_without_a_split_the_rest_is_computed_where_it_is_expected_to_be_faster(
    tokens: int, offer: PrefillOffer | None, tokens_s: float | None, layers: int, reason: str
) -> None:
    got, why = planned(tokens, offer, replace(MAC, tokens_s=tokens_s, long_tokens_s=tokens_s))
    assert got == layers and why.startswith(reason)


@pytest.mark.parametrize(
    ("tokens", "here", "offer", "layers", "reason"),
    [
        (
            8192,
            {},
            {},
            26,
            "8,192 tokens left to compute: 5.46 s here, 1.47 s on a prefill host, 1.32 s with the first 26",
        ),
        (32768, {}, {}, 26, "32,768 tokens left to compute: 21.8 s here"),
        (1024, {}, {}, 32, "1,024 tokens left to compute: 683 ms here, 193 ms on a prefill host, 261 ms"),  # two chunks
        (LONG_TOKENS - 1, {}, {}, 32, "255 tokens left to compute: 170 ms here, 56 ms on a prefill host"),
        (8192, {"share": 0.1}, {}, 32, "8,192 tokens left to compute: 5.46 s here, 1.47 s on a prefill host"),
        (8192, {"room": False}, {}, 32, "8,192 tokens left to compute: 5.46 s here, 1.47 s on a prefill host"),
        (8192, {}, {"wait_s": 9.0}, 0, "8,192 tokens left to compute: 5.46 s here, 10.5 s on a prefill host"),
        # the link is the slowest: fewer layers, and fewer bytes
        (8192, {}, {"link_bytes_s": 2.9e8}, 18, "8,192 tokens left to compute: 5.46 s here, 3.71 s on a prefill host"),
        (8192, {}, {"splits": False}, 32, "8,192 tokens left to compute: 5.46 s here, 1.47 s on a prefill host"),
        (8192, {}, {"kv_version": 4}, 32, "8,192 tokens left to compute: 5.46 s here, 1.47 s on a prefill host"),
        (8192, {}, {"alone": False, "tokens_s": 500.0}, 8, "8,192 tokens left to compute: 16.4 s on a prefill host"),
        # it has only some layers
        (8192, {}, {"layers": 12}, 12, "8,192 tokens left to compute: 5.46 s here, 3.48 s with the first 12 of 32"),
        (100, {}, {"layers": 12}, 0, "100 tokens left to compute: 67 ms here"),
        (100, {}, {"layers": 12, "alone": False}, 0, "100 tokens left to compute: 67 ms here"),
        # until this host has computed a long prompt, it computes some layers of one
        (8192, {"long_tokens_s": None}, {}, 28, "8,192 tokens left to compute; this host's speed is measured with the"),
        (8192, {"tokens_s": None, "long_tokens_s": None}, {}, 28, "8,192 tokens left to compute; this host's speed"),
        (8192, {"tokens_s": None, "long_tokens_s": None}, {"layers": 12}, 12, "8,192 tokens left to compute; this"),
        (100, {"tokens_s": None, "long_tokens_s": None}, {"layers": 12}, 0, "100 tokens left to compute; until its"),
        (8192, {"long_tokens_s": None, "share": 0.1}, {}, 32, "8,192 tokens left to compute: 5.46 s here, 1.47 s on a"),
        # what was measured long ago is measured again, by layers that this host computed in time
        (8192, {"fresh": False}, {}, 26, "8,192 tokens left to compute: 5.46 s here, 1.47 s on a prefill host, 1.32 s"),
        (8192, {"fresh": False, "long_tokens_s": 400.0}, {}, 30, "8,192 tokens left to compute; this host's speed"),
        (8192, {"fresh": False, "long_tokens_s": 1.0}, {}, 31, "8,192 tokens left to compute; this host's speed"),
        (8192, {"fresh": False, "long_tokens_s": 400.0, "share": 0.9}, {}, 32, "8,192 tokens left to compute: 5.46 s"),
    ],
)
def test_a_long_prompt_is_divided_if_that_is_quicker(
    tokens: int, here: dict[str, Any], offer: dict[str, Any], layers: int, reason: str
) -> None:
    got, why = planned(tokens, structs.replace(SPARK, **offer), replace(MAC, **here))
    assert got == layers and why.startswith(reason)


def test_a_prompt_is_planned_by_the_prefill_hosts_speed_for_prompts_about_as_long() -> None:
    offer = structs.replace(SPARK, speeds=(PromptSpeed(8191, 5600.0), PromptSpeed(65535, 1850.0)))
    assert [offer.speed(tokens) for tokens in (100, 8192, 20_000, 40_000)] == [5600.0, 5600.0, 5600.0, 1850.0]
    assert structs.replace(SPARK, speeds=()).speed(8192) == SPARK.tokens_s
    late = structs.replace(offer, tokens_s=1200.0)  # of the last chunks of a long prompt
    mac = replace(MAC, tokens_s=705.0, long_tokens_s=705.0)
    assert planned(65536, late, mac)[0] == planned(65536, structs.replace(SPARK, tokens_s=1850.0), mac)[0] == 23


def test_a_model_that_cannot_be_divided_is_handed_off_and_says_why_if_a_split_is_asked_for() -> None:
    refused = replace(MAC, split=replace(SPLIT, refusal="its layers pass two tensors on"))
    assert planned(8192, here=refused)[0] == 32
    assert planned(8192, here=refused, wanted=12) == (32, "split = 12: its layers pass two tensors on")
    with_some_layers = structs.replace(SPARK, layers=12)
    assert planned(8192, with_some_layers, refused)[0] == 0
    assert planned(8192, with_some_layers, refused, wanted=12)[0] == 0


@pytest.mark.parametrize(
    ("wanted", "offer", "layers"),
    [
        (0, {}, 0),
        (12, {}, 12),
        (31, {}, 31),
        (32, {}, 32),
        (1024, {}, 32),
        (12, {"layers": 12}, 12),
        (12, {"splits": False}, 32),
    ],
)
def test_a_request_may_say_how_many_layers_the_prefill_host_computes(
    wanted: int, offer: dict[str, Any], layers: int
) -> None:
    assert planned(100, structs.replace(SPARK, **offer), wanted=wanted)[0] == layers


def test_a_prefill_host_is_not_asked_for_layers_that_it_has_not() -> None:
    with pytest.raises(RequestError, match=r"split: 13 of 32 layers .* has the first 12") as raised:
        planned(100, structs.replace(SPARK, layers=12), wanted=13)
    assert raised.value.hint == 'give "auto", or 12 at most'


def test_a_head_keeps_kv_of_one_layer_at_least() -> None:
    mixer = LayerLayout("full", 8, 128, 128)
    model = Here(Layout((mixer, mixer), "bfloat16"), SplitLayout(8, (3, 7), 4096), 1500.0, 1500.0)
    assert planned(100, SPARK, model, wanted=1)[0] == 4
    assert planned(32768, SPARK, model)[0] >= 4


def test_rows_of_sliding_layers_and_states_count_as_the_wire_has_them() -> None:
    """A link that is far too slow makes the bytes visible in the seconds."""
    slow = structs.replace(SPARK, link_bytes_s=1e3)
    for layer, nbytes in (
        (LayerLayout("full", 1, 64, 64), 1024 * 256),
        (LayerLayout("sliding", 1, 64, 64, 128), 2 * 128 * 256),  # of each chunk, its last 128 tokens
        (LayerLayout("sliding", 1, 64, 64, 4096), 1024 * 256),
        (LayerLayout("state", states=(StateTensor((500,)),)), 2000),
    ):
        one = Here(Layout((layer, layer), "bfloat16"), SplitLayout(2, (0, 1), 16), 1.0, 1.0)
        made = plan(Rest(0, 1024), slow, one)
        if made.layers == 1:
            assert made.seconds == pytest.approx((nbytes + 1024 * 32) / 1e3, rel=0.5)


def test_of_a_prompt_that_is_held_nothing_is_left_to_plan() -> None:
    held = Rest(100, 100)
    assert plan(held, SPARK, MAC).layers == 0 and not in_chunks(held, SPARK, MAC)


def test_a_plan_is_a_list_of_spans() -> None:
    assert plan(Rest(0, 8192), SPARK, MAC).spans == (Span("prefill", range(26)), Span("decode", range(26, 32)))
    assert plan(Rest(0, 8192), None, MAC).spans == (Span("prefill", range(32)),)
    assert plan(Rest(0, 0), None, MAC).spans == (Span("decode", range(32)),)


def test_a_speed_is_that_of_prompts_which_are_about_as_long() -> None:
    speeds = Speeds()
    assert speeds.of(1000) is None
    speeds.add(15, 1.0)
    assert speeds.of(1000) is None
    speeds.add(16, 0.1)
    assert speeds.of(8000) == 160 and speeds.of(8000, LONG_TOKENS) is None
    speeds.add(4000, 2.0, share=0.25)
    assert speeds.of(8000, LONG_TOKENS) == 500 and speeds.of(20) == 160
    speeds.add(60000, 200.0, now=700.0)
    assert speeds.of(8000, LONG_TOKENS, since=100.0) == 300, "the other is too old to go by"
    assert speeds.of(64000) == 300 and speeds.of(3000) == 500


def test_a_speed_follows_the_latest_measurements_by_their_tokens() -> None:
    speed = Fading(SPEED_WEIGHT)
    assert speed.value is None
    speed.add(1000, 1.0)
    assert speed.value == 1000
    speed.add(10, 1.0)
    assert speed.value == pytest.approx(710 / 1.7)
    for _ in range(30):
        speed.add(500, 1.0)
    assert speed.value == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize(
    ("window", "offer", "chunks"),
    [
        (None, {"link_bytes_s": 1e6}, True),
        (1024, {"link_bytes_s": 1e6}, False),  # the link is slower than the prefill host, and gets more to send
        (1024, {"link_bytes_s": 1e12}, True),
        (1024, {"link_bytes_s": None}, True),
        (1024, {"link_bytes_s": 1e6, "tokens_s": None}, True),
        (None, {"kv_version": 4}, False),
    ],
)
def test_a_hand_off_comes_in_chunks_unless_these_would_take_longer(
    window: int | None, offer: dict[str, Any], chunks: bool
) -> None:
    layout = uniform((window, None) * 16, 8, 128, "bfloat16")
    assert in_chunks(Rest(0, 8192), structs.replace(SPARK, **offer), replace(MAC, layout=layout)) == chunks
