"""Profiles that agree, and one sentence for every way in which they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.api.layout import LayerLayout
from disagg.api.status import PreflightFinding
from disagg.engines.model.profile import (
    FREQUENCY_TOLERANCE,
    LayerProfile,
    ModelProfile,
    Rope,
    compare,
    require,
)
from disagg.errors import PreflightRefused

ROPE = Rope((1.0, 0.1, 0.01))
FULL = LayerProfile(LayerLayout("full", 2, 16, 16), ROPE)
SLIDING = LayerProfile(LayerLayout("sliding", 2, 16, 16, window=64), ROPE)
REFERENCE = ModelProfile("checkpoint", "llama", 640, 4096, (SLIDING, FULL, SLIDING), "t", "c", "s", frozenset({1, 4}))
ACTUAL = replace(REFERENCE, source="mlx-lm")


def refused(actual: ModelProfile, reference: ModelProfile = REFERENCE) -> list[PreflightFinding]:
    return [finding for finding in compare(reference, actual) if finding.status == "refused"]


def with_ropes(*ropes: Rope | None) -> ModelProfile:
    layers = tuple(replace(layer, rope=rope) for layer, rope in zip(ACTUAL.layers, ropes, strict=True))
    return replace(ACTUAL, layers=layers)


def test_equal_profiles_agree_on_every_component() -> None:
    findings = compare(REFERENCE, ACTUAL)

    assert {finding.status for finding in findings} == {"ok"}
    assert [finding.component for finding in findings] == [
        "architecture",
        "vocabulary",
        "number of layers",
        "layer kinds",
        "KV shape",
        "rope",
        "tokenizer",
        "chat template",
        "special tokens",
        "eos",
    ]
    require(findings)


@pytest.mark.parametrize(
    ("field", "value", "component"),
    [
        ("architecture", "qwen2", "architecture"),
        ("vocab_size", 641, "vocabulary"),
        ("tokenizer", "x", "tokenizer"),
        ("chat_template", "x", "chat template"),
        ("special_tokens", "x", "special tokens"),
        ("eos_ids", frozenset({1}), "eos"),
    ],
)
def test_a_differing_value_is_named_with_both_sides(field: str, value: Any, component: str) -> None:
    (finding,) = refused(replace(ACTUAL, **{field: value}))

    assert finding.component == component
    assert finding.detail.startswith("checkpoint has ")
    assert ", mlx-lm has " in finding.detail


def test_an_ignored_window_names_the_framework_and_the_layers() -> None:
    (finding,) = refused(replace(ACTUAL, layers=(FULL, FULL, FULL)))

    assert finding.component == "layer kinds"
    assert finding.detail == (
        "mlx-lm ignores sliding_window=64, which the checkpoint sets and transformers applies, on layers 0, 2"
    )


def test_an_invented_window_names_the_framework_and_the_layer() -> None:
    (finding,) = refused(replace(ACTUAL, layers=(SLIDING, SLIDING, SLIDING)))

    assert finding.detail == "mlx-lm applies sliding_window=64, which transformers does not, on layer 1"


def test_a_window_of_another_size_is_refused() -> None:
    other = replace(SLIDING, layout=replace(SLIDING.layout, window=63))

    (finding,) = refused(replace(ACTUAL, layers=(other, FULL, other)))

    assert finding.detail == "checkpoint has a window of 64, mlx-lm has a window of 63, on layers 0, 2"


@pytest.mark.parametrize(("context", "harmless"), [(64, True), (65, False)])
def test_an_ignored_window_is_harmless_only_where_the_context_fits_it(context: int, harmless: bool) -> None:
    reference = replace(REFERENCE, context=context)

    assert (not refused(replace(ACTUAL, context=context, layers=(FULL, FULL, FULL)), reference)) is harmless


def test_another_number_of_layers_is_refused_without_comparing_them() -> None:
    (finding,) = refused(replace(ACTUAL, layers=(FULL, FULL)))

    assert (finding.component, finding.detail) == (
        "number of layers",
        "checkpoint has 3, mlx-lm has caches for 2",
    )


@pytest.mark.parametrize(("field", "value"), [("kv_heads", 4), ("key_dim", 8), ("value_dim", 8)])
def test_another_kv_shape_names_the_field_and_the_layer(field: str, value: int) -> None:
    change: dict[str, Any] = {field: value}
    other = replace(FULL, layout=replace(FULL.layout, **change))

    (finding,) = refused(replace(ACTUAL, layers=(SLIDING, other, SLIDING)))

    want = getattr(FULL.layout, field)
    assert finding.component == "KV shape"
    assert finding.detail == f"{field} is {want} in checkpoint and {value} in mlx-lm on layer 1"


def test_the_worst_frequency_is_named_with_its_error() -> None:
    off = Rope((1.0, 0.1 * 1.02, 0.01 * 1.43))

    (finding,) = refused(with_ropes(ROPE, off, ROPE))

    assert finding.detail == (
        "mlx-lm turns pair 2 by 0.0143 radians per token instead of 0.01 "
        "(43 % off, the worst of 3 frequencies) on layer 1"
    )


@pytest.mark.parametrize(("factor", "agrees"), [(0.9, True), (1.1, False)])
def test_frequencies_agree_up_to_the_tolerance(factor: float, agrees: bool) -> None:
    near = Rope((1.0, 0.1 * (1 + factor * FREQUENCY_TOLERANCE), 0.01))

    assert (not refused(with_ropes(ROPE, near, ROPE))) is agrees


def test_a_forgotten_attention_factor_is_refused() -> None:
    (finding,) = refused(with_ropes(ROPE, replace(ROPE, scale=1.35), ROPE))

    assert finding.detail == "mlx-lm scales rotated vectors by 1.35 instead of 1 on layer 1"


def test_a_rope_where_the_reference_has_none_is_refused_and_the_other_way_round() -> None:
    nope = replace(REFERENCE, layers=(SLIDING, replace(FULL, rope=None), SLIDING))

    assert refused(ACTUAL, nope)[0].detail == "checkpoint has no rope and mlx-lm has one on layer 1"
    assert refused(with_ropes(ROPE, None, ROPE))[0].detail == "checkpoint has a rope and mlx-lm has none on layer 1"


def test_pairs_that_do_not_turn_may_be_listed_as_zeros_or_left_out() -> None:
    assert not refused(with_ropes(*[Rope((*ROPE.inv_freq, 0.0, 0.0))] * 3))
    assert "rotates 3 pairs and mlx-lm 2" in refused(with_ropes(*[Rope(ROPE.inv_freq[:2])] * 3))[0].detail


def test_require_lists_every_refused_line_and_lets_patched_ones_pass() -> None:
    require([PreflightFinding("rope", "patched", "set from the reference"), PreflightFinding("eos", "ok")])
    with pytest.raises(PreflightRefused) as caught:
        require(
            [
                PreflightFinding("rope", "refused", "off"),
                PreflightFinding("eos", "ok"),
                PreflightFinding("vocabulary", "refused", "small"),
            ]
        )

    assert "rope: off; vocabulary: small" in caught.value.message


@pytest.mark.parametrize(
    ("components", "hints"),
    [
        (["layer kinds"], ["set context to no more tokens than the window has"]),
        (["rope", "vocabulary", "KV shape", "output head"], ["serve it with one framework alone"]),
        (["tokenizer", "eos"], ["give all hosts the same files"]),
        (["layer kinds", "rope"], ["set context to no more tokens", "serve it with one framework alone"]),
    ],
)
def test_the_hint_is_about_what_differs_and_says_everything_once(components: list[str], hints: list[str]) -> None:
    with pytest.raises(PreflightRefused) as caught:
        require([PreflightFinding(component, "refused", "") for component in components])

    said = caught.value.hint.split("; ")
    assert len(said) == len(hints)
    assert all(hint in one for hint, one in zip(hints, said, strict=True))


def test_a_head_that_is_not_the_embeddings_is_refused_unless_it_is_not_known() -> None:
    tied, untied = replace(REFERENCE, tied=True), replace(ACTUAL, tied=False)

    (finding,) = refused(untied, tied)

    assert finding.detail == "checkpoint has the embeddings, mlx-lm has weights of its own"
    assert not refused(replace(untied, tied=None), tied)
    assert not refused(replace(ACTUAL, tied=True), tied)
