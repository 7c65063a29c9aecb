"""KV computed by transformers, decoded by mlx-lm: the same tokens as either alone (float32)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeRequest
from disagg.kv.received import ReceivedKV
from tests.deadlines import wait_until
from tests.engines.mlx.mlx_parts import Collector, Engines, References, prompt, start
from tests.tiny_models import ARCHITECTURES, WINDOW

WINDOWED = ["gpt_oss", "gemma3_text", "cohere2"]
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW + 7)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_handed_over_prompt_gives_the_tokens_of_both_frameworks_alone(
    architecture: Any, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    tokens = prompt(200)

    handed_over = start(engine, tokens, torch_model.kv(tokens[:-1], engine.info.layout))
    answer = handed_over.result()
    alone = start(engine, tokens, max_tokens=24)

    assert answer == torch_model.greedy(tokens, draft=answer)
    assert answer[:24] == alone.result()
    assert len(set(answer)) >= 16, "constant text proves nothing"
    assert handed_over.timing.computed_prompt_tokens == 1
    assert alone.timing.computed_prompt_tokens == len(tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kv_of_another_prompt_changes_the_answer(
    architecture: Any, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    tokens, other = prompt(200), prompt(200, seed=2)
    right = start(engine, tokens, torch_model.kv(tokens[:-1], engine.info.layout), max_tokens=16)
    wrong = start(engine, tokens, torch_model.kv(other[:-1], engine.info.layout), max_tokens=16)

    assert wrong.result() != right.result()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("architecture", WINDOWED)
def test_prompts_around_the_window_hand_over_exactly(
    architecture: Any, length: Any, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    tokens = prompt(length, seed=length)

    handed_over = start(engine, tokens, torch_model.kv(tokens[:-1], engine.info.layout), max_tokens=24)

    assert handed_over.result() == torch_model.greedy(tokens, 24, draft=handed_over.ids)
    assert handed_over.timing.computed_prompt_tokens == 1


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss_yarn"])
def test_requests_of_mixed_length_may_join_a_running_batch_at_any_step(
    architecture: str, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    prompts = [prompt(length, seed=length) for length in (150, 5, WINDOW, 1, 97, 33)]
    running = []
    for index, tokens in enumerate(prompts):
        kv = None if index == 4 else torch_model.kv(tokens[:-1], engine.info.layout)
        running.append(start(engine, tokens, kv, max_tokens=40))
        assert running[-1].first.wait(60)

    for collector, tokens in zip(running, prompts, strict=True):
        assert collector.result() == torch_model.greedy(tokens, 40, draft=collector.ids)
    assert [c.timing.computed_prompt_tokens for c in running] == [1, 1, 1, 1, 97, 1]


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_answers_to_one_prompt_go_on_from_kv_that_was_received_once(
    architecture: Any, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    tokens, salt = prompt(150, seed=8), "several answers"
    first, second = Collector(), Collector()
    kv, sampling = torch_model.kv(tokens[:-1], engine.info.layout), Sampling(max_tokens=200)
    engine.submit(DecodeRequest("first", tokens, sampling, kv, salt=salt, hold_prompt=True), first)
    wait_until(lambda: first.tokens)

    held = engine.find_held(tokens, salt)
    assert held is not None and held.tokens == len(tokens) - 1
    engine.submit(DecodeRequest("second", tokens, sampling, held=held, salt=salt), second)
    assert second.result() == first.result()
    assert second.timing.computed_prompt_tokens == 1
    held.release()


class Scribbler(Collector):
    """Writes over the received KV at the first token, as the transfer does that gets its memory next."""

    def __init__(self, kv: ReceivedKV) -> None:
        super().__init__()
        self._kv = kv

    def on_tokens(self, tokens: Any, timing: Any) -> None:
        if self._kv.arena is not None:
            self._kv.arena.data[:] = 0x3F
            self._kv.release()
        super().on_tokens(tokens, timing)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_by_the_first_token_the_received_memory_may_be_written_over(
    architecture: Any, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    prompts = [prompt(length, seed=length) for length in (97, 200, 2 * WINDOW)]
    running = [start(engine, prompt(300), max_tokens=24)]  # its prompt is still being read as they join
    for index, tokens in enumerate(prompts):
        kv = torch_model.kv(tokens[:-1], engine.info.layout)
        running.append(Scribbler(kv))
        request = DecodeRequest(f"scribbled-{index}", tokens, Sampling(max_tokens=24, ignore_eos=True), kv)
        engine.submit(request, running[-1])

    for collector, tokens in zip(running, (prompt(300), *prompts), strict=True):
        assert collector.result() == torch_model.greedy(tokens, 24, draft=collector.ids)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3_text"])
def test_requests_may_join_while_a_long_prompt_is_still_being_computed(
    architecture: str, mlx_engine: Engines, reference: References
) -> None:
    engine, torch_model = mlx_engine(architecture), reference(architecture)
    long = prompt(700)  # fifteen chunks
    short = [prompt(length, seed=length) for length in (20, 150)]
    handed_over = [torch_model.kv(tokens[:-1], engine.info.layout) for tokens in short]

    alone = start(engine, long, max_tokens=6)
    joined = [start(engine, tokens, kv, max_tokens=6) for tokens, kv in zip(short, handed_over, strict=True)]

    for collector, tokens in zip((alone, *joined), (long, *short), strict=True):
        assert collector.result() == torch_model.greedy(tokens, 6, draft=collector.ids)
    assert joined[1].finished < alone.timing.first_token, "the long prompt held nobody up"
    assert [c.timing.computed_prompt_tokens for c in (alone, *joined)] == [700, 1, 1]


def test_a_repetition_penalty_applies_to_the_handed_over_prompt(mlx_engine: Engines, reference: References) -> None:
    engine, tokens = mlx_engine("llama"), prompt(80)
    kv = reference("llama").kv(tokens[:-1], engine.info.layout)
    penalised = start(engine, tokens, kv, repetition_penalty=1.5, max_tokens=32).result()

    assert penalised == start(engine, tokens, repetition_penalty=1.5, max_tokens=32).result()
    assert penalised != start(engine, tokens, max_tokens=32).result()


def test_logits_over_handed_over_kv_are_those_of_the_whole_pass(mlx_engine: Engines, reference: References) -> None:
    engine, torch_model = mlx_engine("gpt_oss_yarn"), reference("gpt_oss_yarn")
    tokens = prompt(180)

    over_kv = engine.logits(tokens, 5, torch_model.kv(tokens[:-5], engine.info.layout))

    assert np.abs(np.array(over_kv) - torch_model.logits(tokens, 5)).max() < 1e-3
    assert np.abs(np.array(over_kv) - np.array(engine.logits(tokens, 5))).max() < 1e-3


def test_kv_of_another_length_or_layout_is_refused(mlx_engine: Engines, reference: References) -> None:
    from disagg.errors import LayoutMismatch

    engine, torch_model = mlx_engine("llama"), reference("llama")
    tokens = prompt(10)
    kv = torch_model.kv(tokens[:-1], engine.info.layout)

    with pytest.raises(LayoutMismatch, match=r"covers tokens \[0, 9\), but \[0, 8\) are needed"):
        start(engine, tokens[:-1], kv)
    with pytest.raises(LayoutMismatch, match="dtype"):
        start(engine, tokens, replace(kv, layout=replace(kv.layout, dtype="bfloat16")))
    assert (engine.running, engine.kv_bytes) == (0, 0)
