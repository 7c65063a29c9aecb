from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import EngineOptions, Fleet, Host, KeeperSettings, Model
from disagg.fleet.rollout.gate import (
    TOKENS,
    RecordedAnswer,
    RecordedToken,
    difference,
    kind,
    tolerance,
    unusable,
    with_answers,
)

ALTERNATIVES = ((7, -0.5), (8, -0.6), (9, -2.0))
MODEL = Model("m", {"transformers": "owner/m"}, 4096)
HOST = Host("p1", "127.0.0.1", ("prefill",), "m", EngineOptions("transformers"), 8000)


def answer(third: int = 7, host: str = "old", count: int = TOKENS, logprob: float = -0.5) -> RecordedAnswer:
    ids = [7, 7, third, *[7] * TOKENS][:count]
    return RecordedAnswer(host, tuple(RecordedToken(one, logprob, ALTERNATIVES) for one in ids))


@pytest.mark.parametrize(
    ("third", "nats", "same"),
    [(7, 0.0, True), (8, 0.25, True), (8, 0.05, False), (9, 0.25, False), (9, 2.0, True), (10, 9.0, False)],
)
def test_an_answer_may_differ_where_the_recorded_one_was_a_tie(third: int, nats: float, same: bool) -> None:
    assert (difference(answer(), answer(third, "new"), nats) == "") == same


def test_a_difference_names_both_hosts_and_tokens() -> None:
    text = difference(answer(), answer(9, "new"), 0.25)
    assert "new answers 9 as token 3, where old answered 7" in text and "1.5 nats less likely" in text
    assert "not among the likeliest" in difference(answer(), answer(10, "new"), 0.25)


def test_a_short_answer_and_one_that_is_no_number_are_unusable() -> None:
    assert "answered 3 tokens" in unusable(answer(count=3))
    assert "not a number" in difference(answer(), answer(logprob=math.nan), 0.25)
    assert unusable(answer()) == ""


def test_hosts_of_one_model_engine_dtype_and_quantization_are_one_kind() -> None:
    other = replace(HOST, name="p2")
    assert kind(HOST) == kind(other) == "m transformers bfloat16"
    quantized = replace(HOST, engine=replace(HOST.engine, quantization="int8"))
    exact = replace(HOST, engine=replace(HOST.engine, dtype="float32"))
    assert len({kind(HOST), kind(quantized), kind(exact)}) == 3
    assert tolerance(exact) < tolerance(HOST) < tolerance(quantized)


def test_a_host_with_the_first_layers_of_a_model_passes_without_an_answer() -> None:
    part = replace(HOST, engine=replace(HOST.engine, layers="0:2"))
    fleet = Fleet("f", Path("hosts.toml"), {"m": MODEL}, {"p1": HOST})
    assert with_answers(fleet, part) == []
    assert with_answers(fleet, HOST) == [HOST]


def test_a_host_with_several_models_is_tested_with_those_that_it_loads_at_start_or_else_the_first() -> None:
    models = {name: replace(MODEL, name=name) for name in ("a", "b", "c")}
    fleet = Fleet("f", Path("hosts.toml"), models, {})
    several = replace(HOST, model="", models=("a", "b", "c"), keeping=KeeperSettings(range(8100, 8103)))
    assert [one.model for one in with_answers(fleet, several)] == ["a"]
    loads = replace(several, keeping=KeeperSettings(range(8100, 8103), preload=("b", "c")))
    assert [one.name for one in with_answers(fleet, loads)] == [f"{HOST.name}/b", f"{HOST.name}/c"]
