"""bfloat16: recurrent states are float32 on their whole way, and a hand-off adds no more noise than one engine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.gemma3_text import RMSNorm
from safetensors.torch import load_file
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from disagg.config import EngineOptions
from disagg.engines.mlx.load import load
from disagg.engines.model.architectures.gemma import unrounded_norms
from disagg.engines.model.reference import Reference
from disagg.engines.transformers.load import load_model
from disagg.verify.compare import NOISE, EngineRun, compare, within
from tests import fleets
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import Pair, make, running
from tests.engines.mlx.mlx_parts import prompt
from tests.surveys.tables import known

# mlx multiplies experts in float32 only on a CPU, so the latent one has dense layers alone.
MODELS: Mapping[str, dict[str, Any]] = {
    "qwen3_5": config("qwen3_5"),
    "deepseek_v3": {**config("deepseek_v3"), "first_k_dense_replace": 3},
    "falcon_mamba": config("falcon_mamba"),
}
CONTEXT = 2048
BFLOAT16 = {"dtype": "bfloat16"}
BIASES = ("e_score_correction_bias", "expert_bias")


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(MODELS[request.param], tmp_path_factory.mktemp(request.param), dtype="bfloat16") as pair:
        yield pair


@pytest.mark.parametrize("pair", ["qwen3_5"], indirect=True)
def test_recurrent_states_arrive_in_float32_and_are_not_rounded(pair: Pair) -> None:
    kv = pair.kv(prompt(130))
    states = [states for states in kv.states if states]
    assert [[state.dtype for state in layer.states] for layer in kv.layout.layers if layer.states] == [
        ["bfloat16", "float32"]
    ] * len(states)
    for _, recurrent in states:
        low_bits = numpy.frombuffer(bytes(recurrent), numpy.uint32) & 0xFFFF
        assert low_bits.any(), "all values are those of bfloat16"


def test_a_hand_off_is_within_the_noise_of_one_engine(pair: Pair) -> None:
    tokens, last = prompt(264, seed=3), 64
    theirs = EngineRun([], pair.prefill.logits(tokens, last))
    alone = EngineRun([], pair.decode.logits(tokens, last))
    handed_over = EngineRun([], pair.decode.logits(tokens, last, pair.kv(tokens[: 1 - last])))
    for other in (theirs, alone):
        found = compare(handed_over, other)
        assert within(found, NOISE["bfloat16"]), found


@pytest.mark.parametrize(
    "name", ["glm4_moe", "lfm2_moe", "bailing_hybrid", "ernie4_5_moe", "minimax_m2", "kimi_linear"]
)
def test_biases_by_which_experts_are_chosen_are_rounded_in_neither_framework(name: str, tmp_path: Path) -> None:
    make(known()[name], tmp_path)
    options = EngineOptions("transformers", dtype="bfloat16", device="cpu")
    stored = load_file(tmp_path / "model.safetensors")
    by_transformers = load_model(tmp_path, options, torch.device("cpu")).state_dict()
    by_mlx = tree_flatten(load(tmp_path, dtype="bfloat16", device=mx.gpu).model.parameters())
    wanted, theirs = (
        [float(value) for name, one in weights.items() if name.endswith(BIASES) for value in one.flatten()]
        for weights in (stored, by_transformers)
    )
    ours = [value for name, one in by_mlx if name.endswith(BIASES) for value in one.tolist()]
    assert wanted and sorted(wanted) == sorted(theirs) == sorted(ours)


def test_gemmas_norms_are_those_of_transformers_if_the_model_is_not_float32() -> None:
    weight, inputs = torch.randn(64).bfloat16(), torch.randn(200, 64).bfloat16()
    theirs = Gemma3RMSNorm(64)
    theirs.weight.data = weight
    ours = RMSNorm(64, eps=theirs.eps)
    ours.weight = mx.array(weight.float().numpy()).astype(mx.bfloat16)
    loaded: Any = SimpleNamespace(modules=lambda kind: [ours] if kind is RMSNorm else [])

    def differing() -> float:
        computed = ours(mx.array(inputs.float().numpy()).astype(mx.bfloat16)).astype(mx.float32)
        return float((torch.tensor(computed.tolist()) != theirs(inputs).float()).float().mean())

    assert differing() > 0.1
    (found,) = unrounded_norms(loaded)
    assert (found.component, found.status) == ("norms", "patched")
    assert differing() < 0.01
    assert not unrounded_norms(loaded)


def test_real_servers_count_float32_states_among_the_bytes_of_a_transfer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("servers")
    for name, entry in MODELS.items():
        make(entry, folder / name)
    models = {name: folder / name for name in MODELS}
    tokens = prompt(200)
    path = fleets.write_hosts(folder, models, context=CONTEXT, prefill=BFLOAT16, decode=BFLOAT16)
    with fleets.running(path) as fleet, fleet.client() as client:
        for name, model in models.items():
            answer = client.generate(name, tokens=tokens, max_tokens=16, ignore_eos=True, local_prefill=False)
            layout = Reference.open(model, CONTEXT).layout("bfloat16")
            assert answer.metrics.method == "disaggregated"
            assert answer.metrics.kv_bytes == layout.nbytes(len(tokens) - 1)
