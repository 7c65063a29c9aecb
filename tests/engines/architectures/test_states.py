"""States on the wire and in held KV: whole, in float32, and never taken back to an earlier token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.api.names import INT8
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import cached_layers
from disagg.engines.model.architectures.latent import pairs_together
from disagg.engines.staging import RowEmitter
from disagg.kv.blocks import Block
from disagg.planning.refusals import refusal_of_vllm
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import Pair, running
from tests.engines.mlx.mlx_parts import prompt, start

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    wide = {**config("qwen3_next"), "head_dim": 64}  # which can be sent with eight bits
    with running(wide, tmp_path_factory.mktemp("qwen3_next")) as pair:
        yield pair


def test_a_prompt_goes_on_from_the_states_at_the_end_of_a_held_one(pair: Pair) -> None:
    first = prompt(130)
    longer = [*first[:-1], *prompt(40, seed=9)]
    pair.kv(first, salt="turns")
    run = pair.prefill.start(longer[:-1], lambda block: None, salt="turns")
    run.close()

    answer = start(pair.decode, longer, pair.kv(longer, salt="turns"), max_tokens=16).result()

    assert run.held == len(first) - 1
    assert answer == pair.greedy(longer, answer)


def test_a_prompt_that_leaves_a_held_one_before_its_end_is_read_from_its_beginning(pair: Pair) -> None:
    first = prompt(130, seed=4)
    other = [*first[:100], *prompt(40, seed=5)]
    pair.kv(first, salt="branches")
    run = pair.prefill.start(other[:-1], lambda block: None, salt="branches")
    run.close()

    answer = start(pair.decode, other, pair.kv(other, salt="branches"), max_tokens=16).result()

    assert run.held == 0
    assert answer == pair.greedy(other, answer)


def test_a_prompt_that_is_held_whole_has_its_states_sent(pair: Pair) -> None:
    tokens = prompt(90, seed=6)
    first = pair.kv(tokens, salt="again")
    again = pair.kv(tokens, salt="again")
    assert any(first.states)
    for ours, theirs in zip(first.states, again.states, strict=True):
        assert all(numpy.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_states_are_the_same_bytes_if_keys_and_values_are_quantised() -> None:
    layer = LayerLayout("state", states=(StateTensor((3, 64), "bfloat16"), StateTensor((2, 64, 64))))
    tensors = torch.randn(1, 3, 64), torch.randn(1, 2, 64, 64).transpose(-1, -2)
    blocks: list[Block] = []
    RowEmitter(Layout((layer,), "bfloat16"), 4, CPU, blocks.append, wire=INT8).state(0, tensors)
    (block,) = blocks
    expected = [tensors[0][0].bfloat16(), tensors[1][0].contiguous()]
    assert [bytes(view) for view in getattr(block, "tensors")] == [  # noqa: B009 - of a StateBlock
        tensor.view(torch.uint8).numpy().tobytes() for tensor in expected
    ]


def test_a_hand_off_with_eight_bits_brings_the_states_that_one_without_brings(pair: Pair) -> None:
    tokens = prompt(100, seed=7)
    whole, eighth = pair.kv(tokens, salt="whole"), pair.kv(tokens, salt="eight bits", wire=INT8)
    assert any(whole.states)
    for ours, theirs in zip(whole.states, eighth.states, strict=True):
        assert all(numpy.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert eighth.nbytes < whole.nbytes
    answer = start(pair.decode, tokens, eighth, max_tokens=8)
    assert len(answer.result()) == 8 and answer.timing.computed_prompt_tokens == 1


def test_a_transfer_without_tokens_has_no_states() -> None:
    layout = Layout((LayerLayout("state", states=(StateTensor((2, 2)),)),), "float32")
    blocks: list[Block] = []
    RowEmitter(layout, 4, CPU, blocks.append, start=4).state(0, [torch.zeros(1, 2, 2)])
    assert blocks == []


def test_the_halves_of_rotated_pairs_are_put_together() -> None:
    assert pairs_together(torch.tensor([[0, 2, 4, 1, 3, 5]])).tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("nemotron_h", [0, 2, 3]),  # M-M*-
        ("gemma4_text_shared", [0, 1]),
        ("gemma4_text", [0, 1, 2, 3]),
        ("qwen3_next", [0, 1, 2, 3]),
    ],
)
def test_layers_that_keep_nothing_of_their_own_are_left_out(name: str, kept: list[int]) -> None:
    from transformers import CONFIG_MAPPING

    given = config(name)
    text = CONFIG_MAPPING[given.pop("model_type")](**given)
    assert cached_layers(text) == kept
    assert len(architecture_of(text).layers(text)) == len(kept)


def test_falcon_h1_multiplies_biases_as_its_config_states(tmp_path: Path) -> None:
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), True)
    with running({**config("falcon_h1"), **biases}, tmp_path) as pair:
        assert pair.difference(prompt(60, seed=1), prompt(8, seed=2)) < 1e-3


@pytest.mark.parametrize(
    ("stated", "ignored"),
    [
        ({}, ""),
        ({"attention_bias": True, "mlp_bias": True}, "attention_bias, mlp_bias"),
        ({"mamba_proj_bias": True}, "projectors_bias"),
        ({"mamba_proj_bias": True, "projectors_bias": True}, ""),
    ],
)
def test_biases_of_falcon_h1_that_vllm_ignores_are_refused_there(stated: dict[str, bool], ignored: str) -> None:
    from transformers import CONFIG_MAPPING

    text = CONFIG_MAPPING["falcon_h1"].from_dict({**config("falcon_h1"), **stated})
    reason = f"vLLM ignores {ignored}, which transformers applies" if ignored else ""
    assert refusal_of_vllm(text, "cpu", 1) == reason
    assert bool(refusal_of_vllm(text, "cpu", 2)) == (bool(ignored) or text.mamba_proj_bias)
