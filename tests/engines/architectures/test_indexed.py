"""The keys of indexers: a layer of the layout of their own, held, quantised, audited and emitted like rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from disagg.api.layout import LayerLayout
from disagg.api.names import INT8
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest
from disagg.engines.base.audit import BOUNDS
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.prefill import MLXPrefillEngine
from disagg.engines.model.architectures import architecture_of
from disagg.errors import KVRefuted, PreflightRefused
from disagg.planning.checkpoint import kv_layout
from disagg.planning.refusals import refusal
from tests.engines.architectures.configs import config
from tests.engines.architectures.handoff import hand_over
from tests.engines.architectures.pairs import CONTEXT, Pair, loaded, make
from tests.engines.mlx.mlx_parts import Collector, prompt, start
from tests.values import present

WIDE = config("glm_moe_dsa")  # whose keys can be sent with eight bits
INDEX = LayerLayout("index", 1, 64)
PLACES = (0, 0, 1, 1, 2, 3, 4, 4)  # its third and fourth layer take what the second has chosen


ANSWER = Sampling(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm_moe_dsa")
    make(WIDE, folder)
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    with loaded(folder) as pair:
        yield pair


def submitted(pair: Pair, request: DecodeRequest) -> Collector:
    collector = Collector()
    pair.decode.submit(request, collector)
    return collector


def text(name: str, **changes: Any) -> Any:
    """transformers' configuration of a tiny model."""
    given = {**config(name), **changes}
    return CONFIG_MAPPING[given.pop("model_type")](**given)


def test_a_layer_with_an_indexer_is_two_layers_of_the_layout(pair: Pair) -> None:
    layout, split = pair.decode.info.layout, pair.decode.info.split
    assert split.places == PLACES
    assert [index for index, layer in enumerate(layout.layers) if layer == INDEX] == [1, 3, 7]


def test_a_prompt_goes_on_from_held_keys_wherever_it_leaves_the_held_prompt(pair: Pair) -> None:
    first = prompt(130)
    other = [*first[:100], *prompt(60, seed=5)]
    pair.kv(first, salt="branches")
    run = pair.prefill.start(other[:-1], lambda block: None, salt="branches")
    run.close()

    answer = start(pair.decode, other, pair.kv(other, salt="branches"), max_tokens=16).result()
    longer = [*other, *answer, *prompt(30, seed=6)]
    held = present(pair.decode.find_held(longer, ""))
    kv = pair.kv(longer, salt="branches", start=held.tokens)
    there = submitted(pair, DecodeRequest("longer", longer, ANSWER, kv, held=held))
    both = there.result()
    held.release()

    assert run.held == 100
    assert answer == pair.greedy(other, answer)
    assert held.tokens == len(other) + len(answer)
    assert both == pair.greedy(longer, both)


def test_keys_of_indexers_are_quantised_with_the_other_rows(pair: Pair) -> None:
    tokens = prompt(100, seed=7)
    whole, eighth = pair.kv(tokens, salt="whole"), pair.kv(tokens, salt="eight bits", wire=INT8)
    assert [len(planes) for planes in whole.keys] == [1] * len(PLACES)
    assert [len(planes) for planes in eighth.keys] == [3 if index in (1, 3, 7) else 1 for index in range(len(PLACES))]
    answer = start(pair.decode, tokens, eighth, max_tokens=8)
    assert len(answer.result()) == 8 and answer.timing.computed_prompt_tokens == 1


def test_an_audit_finds_wrong_keys_of_an_indexer_and_accepts_right_ones(pair: Pair) -> None:
    tokens = prompt(90, seed=8)

    right, wrong = pair.kv(tokens, salt="right"), pair.kv(tokens, salt="wrong")
    (keys,) = wrong.keys[7]
    keys.data[:] = keys.data[::-1]
    accepted, refuted = (
        submitted(pair, DecodeRequest(name, tokens, ANSWER, kv, audit=BOUNDS["float32"]))
        for name, kv in (("right", right), ("wrong", wrong))
    )
    assert len(accepted.result()) == 16 and accepted.timing.audit is not None
    with pytest.raises(KVRefuted, match="of layer 7"):
        refuted.result()


def test_mlx_lm_emits_what_transformers_emits(pair: Pair, folder: Path) -> None:
    tokens = prompt(110, seed=9)
    engine = MLXPrefillEngine(folder, CONTEXT, EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48))
    try:
        kv = hand_over(engine, pair.decode, tokens[:-1])
        again = hand_over(engine, pair.decode, tokens[:-1], start=64)
    finally:
        engine.close()
    assert again.nbytes < kv.nbytes
    answer = start(pair.decode, tokens, kv, max_tokens=16).result()
    assert answer == pair.greedy(tokens, answer)


def test_a_checkpoint_that_lacks_the_weights_of_an_indexer_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".1.self_attn.indexer" not in k}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = EngineOptions("mlx", dtype="float32", device="cpu")
    with pytest.raises(PreflightRefused, match="number of layers: checkpoint has 8, mlx-lm has caches for 7"):
        MLXDecodeEngine(tmp_path, CONTEXT, options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"indexer_rope_interleave": True}, "transformers ignores indexer_rope_interleave = true"),
        ({"index_n_heads": 8}, "its indexers have 8 heads"),
        ({"index_n_heads": 8, "index_topk": 8192}, ""),
    ],
    ids=["as published", "pairs of neighbours", "few heads", "few heads that choose every token"],
)
def test_what_the_frameworks_compute_otherwise_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    given = text("deepseek_v32", **changes)
    assert refusal(given, type(given)).startswith(reason)
    assert bool(refusal(given, type(given))) == bool(reason)


def test_layers_that_take_the_choice_of_others_are_not_divided_from_them() -> None:
    shared, own = text("glm_moe_dsa"), text("glm_moe_dsa", index_topk_pattern=None)
    assert architecture_of(shared).split(shared) == "some of its layers attend to what earlier ones have chosen"
    assert not architecture_of(own).split(own)


@pytest.mark.parametrize(
    "changes",
    [{}, {"index_topk_pattern": None}, {"index_topk_pattern": None, "index_topk_freq": 2}],
    ids=["a pattern", "every layer", "every second"],
)
def test_memory_is_planned_for_the_keys_of_the_indexers(changes: dict[str, Any]) -> None:
    raw = {key: value for key, value in {**WIDE, **changes}.items() if value is not None}
    planned = kv_layout(raw, "bfloat16")
    given = text("glm_moe_dsa", **changes)
    assert planned is not None
    assert planned.layers == tuple(one.layout for one in architecture_of(given).layers(given))
