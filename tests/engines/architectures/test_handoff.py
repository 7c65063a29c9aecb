"""Every architecture: KV by transformers, decoded by mlx-lm, gives the tokens of either alone (float32)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engines.architectures.configs import CONFIGS, config
from tests.engines.architectures.pairs import Pair, running
from tests.engines.mlx.mlx_parts import prompt, start
from tests.engines.transformers.heads import computed, hidden_states

LENGTHS = (1, 2, 63, 64, 65, 200)
ALONE = (2, 65)
ANSWER = 24


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(config(request.param), tmp_path_factory.mktemp(request.param)) as pair:
        yield pair


def test_prompts_of_every_length_joined_to_one_batch_are_answered_as_by_either_alone(pair: Pair) -> None:
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}
    handed_over = {
        length: start(pair.decode, tokens, pair.kv(tokens), max_tokens=ANSWER) for length, tokens in prompts.items()
    }
    alone = {length: start(pair.decode, prompts[length], max_tokens=ANSWER) for length in ALONE}

    for length, collector in handed_over.items():
        answer = collector.result()
        assert answer == pair.greedy(prompts[length], answer), f"{length} tokens, transformers alone"
        assert collector.timing.computed_prompt_tokens == 1
    for length, collector in alone.items():
        assert collector.result() == handed_over[length].ids, f"{length} tokens, mlx-lm alone"
    assert max(len(set(collector.ids)) for collector in handed_over.values()) >= 8, "constant text proves nothing"


def test_heads_of_every_length_emit_what_the_whole_model_has_there_or_are_refused_by_name(pair: Pair) -> None:
    engine, tokens = pair.prefill, prompt(130, seed=3)
    split = engine.info.split
    whole = computed(engine, tokens, split.layers, salt="whole")
    for layers in range(1, split.layers):
        if split.refusal:
            assert engine.info.cannot_compute(layers) == f"the model cannot be divided between hosts: {split.refusal}"
            continue
        head, want = computed(engine, tokens, layers, salt="head"), hidden_states(engine, tokens, layers)
        difference = (head.hidden(torch.float32).view(want.shape) - want).abs().max()
        assert difference < 1e-4 * want.abs().max()
        assert (head.chunks, head.layers) == (whole.chunks, set(range(split.count(layers))))
        assert all(head.rows(layer) == whole.rows(layer) for layer in head.layers)
        assert head.states == whole.states[: len(head.states)]
