"""disagg/servers/prefill/delivery.py: int8 if it was asked for, or if transfers have shown too slow a link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import AS_IS, INT8
from disagg.api.requests import PromptSpeed
from disagg.engines.base import PrefillTiming
from disagg.kv.sent import ComputeStep, SentKV, Span, TransferResult
from disagg.servers.prefill.delivery import (
    FRESH_S,
    MARGIN,
    MAX_TRANSFERS,
    RATED_TOKENS,
    MeasuredRates,
    Rates,
    choose_form,
)

CODER = Layout((LayerLayout("full", 4, 128, 128),) * 48, "bfloat16")  # 98304 bytes a token
NARROW = Layout((LayerLayout("full", 4, 80, 80),) * 48, "bfloat16")
TEN_GBE = 1.15e9
DECODE = ("10.0.0.1", 9001)
OTHER = ("10.0.0.2", 9001)


@pytest.mark.parametrize(
    ("tokens_s", "link_bytes_s", "form"),
    [
        (5_000, TEN_GBE, AS_IS),  # 0.49 GB/s of KV
        (11_000, TEN_GBE, AS_IS),  # 1.08 GB/s: hidden, if only just
        (13_000, TEN_GBE, AS_IS),  # 1.28 GB/s: within the margin
        (16_000, TEN_GBE, INT8),  # 1.57 GB/s
        (16_000, 2 * TEN_GBE, AS_IS),
        (200, 12e6, INT8),
    ],
)
def test_auto_takes_int8_only_where_sending_takes_clearly_longer_than_computing(
    tokens_s: float, link_bytes_s: float, form: str
) -> None:
    assert choose_form("auto", CODER, 8000, Rates(tokens_s, link_bytes_s)) == form


def test_the_margin_is_where_it_is_said_to_be() -> None:
    rate = 98304 * 10_000 / MARGIN
    assert choose_form("auto", CODER, 8000, Rates(10_000, rate * 1.001)) == AS_IS
    assert choose_form("auto", CODER, 8000, Rates(10_000, rate * 0.999)) == INT8


def test_some_layers_are_computed_as_much_quicker_as_they_are_fewer() -> None:
    half = Layout(CODER.layers[: len(CODER.layers) // 2], CODER.dtype)
    for tokens_s, form in ((13_000, AS_IS), (16_000, INT8)):
        assert choose_form("auto", half, 8000, Rates(tokens_s, TEN_GBE), 0.5) == form
    seen = MeasuredRates()
    seen.add(DECODE, COMPUTED, transfer(0.0, 4.0, 400_000_000), layers=0.25)
    assert seen.rates(DECODE, 5.0).tokens_s == 500, "of all layers"


@pytest.mark.parametrize("rates", [Rates(), Rates(1e9, None), Rates(None, 1.0)])
def test_auto_leaves_kv_as_it_is_until_real_transfers_have_shown_both_rates(rates: Rates) -> None:
    assert choose_form("auto", CODER, 8000, rates) == AS_IS


def test_only_the_rows_that_are_sent_count() -> None:
    sliding = Layout((LayerLayout("sliding", 4, 128, 128, window=128),) * 48, "bfloat16")
    assert choose_form("auto", sliding, 8000, Rates(16_000, TEN_GBE)) == AS_IS
    assert choose_form("auto", sliding, 128, Rates(16_000, TEN_GBE)) == INT8


def test_what_was_asked_for_does_not_depend_on_rates() -> None:
    slow, fast = Rates(1e9, 1.0), Rates(1.0, 1e12)
    assert {choose_form("as-is", CODER, 8000, rates) for rates in (Rates(), slow, fast)} == {AS_IS}
    assert {choose_form("int8", CODER, 8000, rates) for rates in (Rates(), slow, fast)} == {INT8}


def test_kv_that_would_not_shrink_goes_as_it_is_and_is_called_so() -> None:
    assert choose_form("int8", NARROW, 8000, Rates()) == AS_IS
    assert choose_form("int8", CODER, 0, Rates()) == AS_IS


def transfer(began: float, ended: float, nbytes: int, waited: bool = False) -> SentKV:
    """waited: the sender waited for KV up to the last eighth of the bytes."""
    end = ended - (ended - began) / 8
    spans = (Span(began, end, nbytes // 8 * 7), Span(end, ended, nbytes // 8))
    return TransferResult(ended, spans, int(waited)).sent(ended, ())


COMPUTED = PrefillTiming(0.0, 4000, (ComputeStep(0.0, 2.0),))


def test_both_rates_come_from_transfers_and_a_links_is_the_best_it_showed() -> None:
    seen = MeasuredRates()
    seen.add(DECODE, COMPUTED, transfer(0.0, 4.0, 400_000_000))
    assert seen.rates(DECODE, 5.0) == Rates(2000, None)  # one transfer is not enough
    seen.add(DECODE, COMPUTED, transfer(6.0, 8.0, 400_000_000))
    seen.add(DECODE, COMPUTED, transfer(8.0, 12.0, 400_000_000))
    assert seen.rates(DECODE, 13.0) == Rates(2000, 200e6)
    seen.add(OTHER, COMPUTED, transfer(12.0, 13.0, 400_000_000, waited=True))
    assert seen.rates(OTHER, 13.0) == Rates(2000, None)
    assert seen.links(13.0) == {"10.0.0.1:9001": 200e6}


def test_transfers_that_keep_up_raise_a_rate_that_was_measured_too_low_and_do_not_push_it_out() -> None:
    seen, kept_up = MeasuredRates(), replace(transfer(8.0, 10.0, 1_600_000_000), link_bytes_s=None)
    assert kept_up.carried_bytes_s == 800e6
    seen.add(DECODE, COMPUTED, kept_up)
    assert seen.rates(DECODE, 11.0).link_bytes_s is None, "it was never the bottleneck"
    for _ in range(2):
        seen.add(DECODE, COMPUTED, transfer(0.0, 4.0, 400_000_000))
    for _ in range(2 * MAX_TRANSFERS):
        seen.add(DECODE, COMPUTED, kept_up)
    assert seen.rates(DECODE, 11.0).link_bytes_s == 800e6


def test_the_speed_of_the_last_prompt_of_each_length_is_stated() -> None:
    """In powers of two, so that their number is bounded."""
    seen = MeasuredRates()
    for tokens, seconds in ((4000, 1.0), (4095, 2.0), (65000, 65.0), (RATED_TOKENS - 1, 0.1)):
        seen.add(DECODE, PrefillTiming(0.0, tokens, (ComputeStep(0.0, seconds),)), transfer(0.0, 4.0, 1), layers=0.5)
    assert list(seen.speeds) == [PromptSpeed(4095, 4095 / 4), PromptSpeed(65000, 500.0)]


def test_a_link_is_forgotten_after_a_while_so_that_it_is_measured_anew() -> None:
    seen = MeasuredRates()
    for _ in range(2):
        seen.add(DECODE, COMPUTED, transfer(0.0, 4.0, 400_000_000))
    assert seen.rates(DECODE, 4.0 + FRESH_S - 1).link_bytes_s == 100e6
    assert seen.rates(DECODE, 4.0 + FRESH_S).link_bytes_s is None


def test_the_time_that_other_prompts_had_between_its_chunks_is_not_a_prompts_own() -> None:
    seen = MeasuredRates()
    shared = PrefillTiming(0.0, 4000, (ComputeStep(0.0, 1.0), ComputeStep(7.0, 9.0, 0.5)))
    seen.add(DECODE, shared, transfer(0.0, 9.1, 400_000_000))
    assert seen.rates(DECODE, 10.0).tokens_s == 2000


def test_short_prompts_and_transfers_that_kept_up_teach_nothing() -> None:
    seen = MeasuredRates()
    short = replace(COMPUTED, tokens=RATED_TOKENS - 1)
    for _ in range(3):
        seen.add(DECODE, short, transfer(0.0, 2.1, 1_000_000, waited=True))
        seen.add(DECODE, short, transfer(0.0, 2.1, 1_000_000))
    assert seen.rates(DECODE, 3.0) == Rates()
