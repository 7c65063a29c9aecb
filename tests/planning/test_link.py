"""What a link hides behind a prefill and what it exposes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.api.names import INT8, WIRE_FORMS
from disagg.planning.devices import DEVICES
from disagg.planning.shapes import SHAPES
from disagg.planning.times import Link, carry, prefill, ship

LINK = Link(gbit_s=8 * 1538 / 1448, latency_s=0.0)  # 1e9 payload bytes a second
QWEN = SHAPES["qwen3-coder-30b"]
PLAN = prefill(DEVICES["dgx-spark"], QWEN, 8191, "bfloat16", 2048)


def test_ten_gigabit_carry_nearly_1_2_gigabytes_a_second() -> None:
    assert Link(10).bytes_per_s == pytest.approx(1.177e9, rel=1e-3)


def test_blocks_leave_in_turn_and_only_when_they_exist() -> None:
    shipment = carry([(1.0, 1e9), (1.0, 1e9), (5.0, 1e9)], 5.5, LINK)
    assert shipment.nbytes == 3e9
    assert shipment.busy_s == pytest.approx(3.0)
    assert shipment.exposed_s == pytest.approx(0.5)
    assert shipment.hidden_s == pytest.approx(2.5)


def test_hidden_and_exposed_add_up_when_the_link_never_idles_after_prefill() -> None:
    slow = ship(PLAN, QWEN, "bfloat16", Link(1.0, 0.0))
    assert slow.hidden_s + slow.exposed_s == pytest.approx(slow.busy_s)


def test_latency_is_paid_once_each_way_where_all_else_is_hidden() -> None:
    assert carry([(0.0, 1e6)], 1.0, replace(LINK, latency_s=0.01)).exposed_s == pytest.approx(0.02)


def test_nothing_to_send_exposes_nothing() -> None:
    assert carry([], 1.0, Link(10, 1.0)).exposed_s == 0.0


def test_a_faster_link_never_exposes_more() -> None:
    exposed = [ship(PLAN, QWEN, "bfloat16", Link(gbit)).exposed_s for gbit in (0.5, 1, 2, 4, 8, 100)]
    assert exposed == sorted(exposed, reverse=True)


def test_layer_by_layer_hides_what_sending_at_the_end_would_not() -> None:
    link = Link(QWEN.layout("bfloat16").nbytes(8191) * 8 / 1e9 / (0.6 * PLAN.seconds) * 1538 / 1448, 0.0)
    shipment = ship(PLAN, QWEN, "bfloat16", link)
    assert shipment.busy_s == pytest.approx(0.6 * PLAN.seconds)
    assert shipment.exposed_s / shipment.busy_s <= 0.06


def test_int8_takes_17_32nds_of_sixteen_bits() -> None:
    plain, packed = (ship(PLAN, QWEN, "bfloat16", Link(10), wire) for wire in WIRE_FORMS)
    assert packed.nbytes / plain.nbytes == pytest.approx(17 / 32)
    assert packed.nbytes == pytest.approx(8191 * 52224)
    of_float32 = ship(PLAN, QWEN, "float32", Link(10), INT8).nbytes
    assert of_float32 == pytest.approx(packed.nbytes * 18 / 17), "scale and bias have the dtype of the KV"
    assert of_float32 == QWEN.layout("float32").nbytes(8191, wire=INT8)
