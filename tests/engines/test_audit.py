"""disagg/engines/base/audit.py: what of a hand-off is computed again, and what it may differ by."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.engines.base.audit import (
    BOUNDS,
    FIRST,
    LAST,
    MEASURES,
    SAMPLE,
    AuditBounds,
    AuditFinding,
    Deviation,
    bounds,
    plan,
    refutation,
)

FULL = LayerLayout("full", 2, 16, 16)
SLIDING = LayerLayout("sliding", 2, 16, 16, window=64)
STATE = LayerLayout("state", states=(StateTensor((3, 8)), StateTensor((2, 4, 4))))
BOTH = LayerLayout("full", 2, 16, 16, states=STATE.states)


@pytest.mark.parametrize(
    ("layers", "received", "passes", "rows"),
    [
        ([FULL, FULL], (0, 100), [(92, 100)], {0: (92, 100), 1: (92, 100)}),
        ([FULL, FULL], (0, 5), [(0, 5)], {0: (0, 5), 1: (0, 5)}),
        ([FULL, FULL], (96, 100), [(96, 100)], {0: (96, 100), 1: (96, 100)}),
        ([SLIDING, FULL], (0, 64), [(56, 64)], {0: (56, 64), 1: (56, 64)}),
        ([SLIDING, FULL], (0, 65), [(0, 32), (64, 65)], {0: (64, 65), 1: (64, 65)}),
        ([SLIDING, FULL], (40, 100), [(40, 72), (99, 100)], {0: (99, 100), 1: (99, 100)}),
        ([SLIDING, SLIDING], (0, 65), [(64, 65)], {0: (64, 65), 1: (64, 65)}),
        ([STATE, FULL], (0, 100), [(0, 32)], {0: (0, 0), 1: (0, 32)}),
        ([STATE, FULL], (50, 60), [(50, 60)], {0: (0, 0), 1: (50, 60)}),
        ([BOTH, BOTH], (0, 100), [(0, 32)], {0: (0, 32), 1: (0, 32)}),
        ([STATE, SLIDING], (0, 100), [(0, 32)], {0: (0, 0), 1: (0, 0)}),
    ],
    ids=lambda value: None,
)
def test_which_tokens_run_and_which_rows_are_compared(
    layers: list[LayerLayout],
    received: tuple[int, int],
    passes: list[tuple[int, int]],
    rows: dict[int, tuple[int, int]],
) -> None:
    """rows: of the last pass."""
    found = plan(Layout(tuple(layers), "float32"), *received)
    assert [(one.begin, one.end) for one in found.passes] == passes
    last = {index: range(*one) for index, one in rows.items()}
    assert dict(enumerate(found.passes[-1].rows)) == last
    assert found.tokens == sum(end - begin for begin, end in passes)


def test_the_first_rows_of_sliding_layers_are_gone_and_not_compared() -> None:
    first, last = plan(Layout((SLIDING, FULL), "float32"), 0, 500).passes
    assert (first.on_held, first.rows) == (True, (range(0), range(FIRST))) and not last.on_held


@pytest.mark.parametrize(("received", "compared"), [((0, 20), True), ((0, 100), False), ((90, 100), True)])
def test_states_are_compared_if_all_received_tokens_run(received: tuple[int, int], compared: bool) -> None:
    (only,) = plan(Layout((STATE, FULL), "float32"), *received).passes
    assert only.states is compared


@pytest.mark.parametrize(
    ("first", "received", "sampled", "inputs"),
    [
        (FULL, (0, 100), 100, 0),
        (FULL, (0, 5000), SAMPLE, 0),
        (FULL, (4990, 5000), 10, 0),
        (SLIDING, (0, 5000), 64, 0),
        (STATE, (0, 5000), 0, 3),
        (STATE, (4998, 5000), 0, 2),
        (BOTH, (0, 100), 100, 3),
    ],
)
def test_of_the_first_layer_a_sample_of_all_received_rows_is_compared(
    first: LayerLayout, received: tuple[int, int], sampled: int, inputs: int
) -> None:
    found = plan(Layout((first, FULL), "float32"), *received, seed="a")
    kept = first.rows(received[1], received[0])
    assert (len(found.sample), found.inputs) == (sampled, inputs)
    assert set(found.sample) <= set(kept) and sorted(set(found.sample)) == list(found.sample)


def test_each_request_has_another_sample_which_is_spread_over_the_prompt() -> None:
    layout = Layout((FULL,), "float32")
    one, other = (plan(layout, 0, 10_000, seed=seed).sample for seed in "ab")
    assert one != other and plan(layout, 0, 10_000, seed="a").sample == one
    assert max(after - before for before, after in pairwise(one)) < 3 * 10_000 / SAMPLE


def test_a_plan_of_few_tokens_has_a_measure_of_its_own() -> None:
    layout = Layout((FULL,), "float32")
    assert [plan(layout, 0, tokens).passes[0].measure for tokens in (1, 4, 5, LAST, 100)] == [
        "few",
        "few",
        "rows",
        "rows",
        "rows",
    ]


def test_bounds_are_wider_where_more_is_rounded() -> None:
    exact, half = bounds("float32", "as-is", same_weights=True), bounds("bfloat16", "as-is", same_weights=True)
    int8, other = bounds("float32", "int8-g64", same_weights=True), bounds("float32", "as-is", same_weights=False)
    for measure in MEASURES:
        values = [getattr(one, measure) for one in (exact, half, int8, other)]
        assert values == sorted(values)
    assert bounds("bfloat16", "int8-g64", same_weights=False) == BOUNDS["other weights"]
    assert half.times(2) == AuditBounds(0.1, 1.0, 4.0)


def test_a_finding_is_over_its_bounds_by_any_measure() -> None:
    finding = AuditFinding(9, (Deviation("sample", 0.1, 0), Deviation("rows", 0.5, 3)))
    assert finding.over(AuditBounds(0.1, 0.5, 0.0)) is None
    assert finding.over(AuditBounds(0.2, 0.4, 0.0)) == Deviation("rows", 0.5, 3)
    assert finding.share(AuditBounds(1.0, 1.0, 1.0)) == 0.5


@pytest.mark.parametrize(
    ("wrong", "message", "of_received"),
    [
        (Deviation("sample", 1.4, 0), "rows of the first layer differ by 1.4 from what", True),
        (Deviation("rows", 0.6, 7), "rows of layer 7 differ by 0.6 from what", False),
        (Deviation("few", inf, 2), "rows of layer 2 are no numbers", False),
    ],
)
def test_a_refutation_says_where_and_whether_held_kv_may_be_to_blame(
    wrong: Deviation, message: str, of_received: bool
) -> None:
    error = refutation(wrong, BOUNDS["bfloat16"], 8)
    assert message in error.message and (error.of_received, error.audited_tokens) == (of_received, 8)
