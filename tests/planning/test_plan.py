"""Crossover, wanted link and throughput of a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.api.names import WIRE_FORMS
from disagg.errors import UsageError
from disagg.planning import capacity
from disagg.planning.capacity import Setup
from disagg.planning.devices import DEVICES, device
from disagg.planning.shapes import SHAPES
from disagg.planning.times import Link, generation, step

SPARK, MAC = DEVICES["dgx-spark"], DEVICES["m3-ultra"]
QWEN = SHAPES["qwen3-coder-30b"]
SETUP = Setup(QWEN, SPARK, MAC, Link(10.0))


def test_a_forecasts_parts_add_up() -> None:
    whole = capacity.disaggregated(replace(SETUP, link=Link(1.0)), 4096, 64)
    shared = whole.overhead_s + whole.prefill_s + whole.exposed_s + whole.ingest_s
    assert whole.total_s == pytest.approx(shared + whole.decode_s)
    assert whole.ttft_s == pytest.approx(shared + whole.first_step_s)
    assert whole.exposed_s > 0


def test_decode_sums_its_steps() -> None:
    steps = sum(step(MAC, QWEN, 1000 + index, "bfloat16") for index in range(200))
    assert generation(MAC, QWEN, 1000, 200, dtype="bfloat16") == pytest.approx(steps, rel=1e-3)
    assert generation(MAC, QWEN, 1000, 1, dtype="bfloat16") == pytest.approx(step(MAC, QWEN, 1000, "bfloat16"))
    assert generation(MAC, QWEN, 1000, 0, dtype="bfloat16") == 0.0


def test_a_decode_step_reads_active_weights_and_kv() -> None:
    llama, exact = SHAPES["llama-3.1-8b"], replace(MAC, layer_overhead_s=0.0)
    read = llama.active_params * 2 + llama.layout("float16").nbytes(8192)
    assert step(exact, llama, 8192, "float16") == pytest.approx(read / MAC.bytes_per_s)


def test_a_batch_costs_less_than_its_requests_one_by_one() -> None:
    one, sixteen = (step(MAC, QWEN, 2048, "bfloat16", batch) for batch in (1, 16))
    assert one < sixteen < 16 * one


def test_the_handoff_wins_from_the_crossover_on_and_not_before() -> None:
    found = capacity.crossover(SETUP, 128, 32768)
    assert found is not None

    def margin(prompt: int) -> float:
        alone = [capacity.alone(SETUP, machine, prompt, 128).total_s for machine in (SPARK, MAC)]
        return min(alone) - capacity.disaggregated(SETUP, prompt, 128).total_s

    assert margin(found) > 0
    assert margin(round(found * 0.95)) < 0


def test_two_machines_of_one_kind_have_no_crossover() -> None:
    assert capacity.crossover(replace(SETUP, prefill_device=MAC), 128, 8192) is None


def test_a_link_too_slow_has_no_crossover() -> None:
    assert capacity.crossover(replace(SETUP, link=Link(0.1)), 128, 8192) is None


def test_the_link_that_hides_does_and_a_slower_one_does_not() -> None:
    wanted = capacity.hiding_gbit_s(SETUP, 8192)
    assert wanted is not None
    assert capacity.disaggregated(replace(SETUP, link=Link(wanted)), 8192, 1).hidden
    assert not capacity.disaggregated(replace(SETUP, link=Link(0.9 * wanted)), 8192, 1).hidden


def test_no_link_hides_behind_a_long_latency() -> None:
    assert capacity.hiding_gbit_s(replace(SETUP, link=Link(10, latency_s=1.0)), 512) is None


def test_int8_saves_time_only_on_a_link_that_exposes() -> None:
    for gbit, saves in ((1.0, True), (100.0, False)):
        setup = replace(SETUP, link=Link(gbit))
        as_is, packed = (capacity.disaggregated(replace(setup, wire=wire), 8192, 8).total_s for wire in WIRE_FORMS)
        assert (as_is - packed > 0.001) == saves


@pytest.mark.parametrize(
    ("link", "output", "bound"), [(10.0, 16, "prefill"), (0.5, 16, "link"), (10.0, 4096, "decode")]
)
def test_throughput_is_held_by_the_slowest_stage(link: float, output: int, bound: str) -> None:
    served = capacity.throughput(replace(SETUP, link=Link(link)), 8192, output, 4)
    assert served.bound == bound
    assert served.requests_per_s * output <= served.decode_tokens_per_s


def test_memory_is_weights_and_kv() -> None:
    assert capacity.memory_gb(SETUP, 8192, 10) == pytest.approx((QWEN.weight_bytes + 10 * 805_306_368) / 1e9)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_says_where_its_figures_come_from(name: str) -> None:
    machine = device(name)
    assert "fitted" in machine.basis or "assumed" in machine.basis
    assert all(
        0 < share < 1 for share in (machine.prefill_fraction, machine.expert_fraction, machine.bandwidth_fraction)
    )


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'm9'.*dgx-spark"):
        device("m9")
