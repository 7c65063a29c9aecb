"""KV of finished prompts on a prefill host: sharing it changes no row and no token, and it stays within its limit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest
from disagg.engines.model.prefix_cache import salted
from disagg.engines.transformers.cache import PreallocatedCache
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import ModelError
from tests import tiny_models
from tests.tiny_models import TinyModel
from tests.values import present


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, tiny_models.VOCAB) for _ in range(length)]


def engine_on(path: Any, max_held_bytes: int = 1 << 30) -> TransformersPrefillEngine:
    options = EngineOptions("transformers", "float32", "cpu", chunk_tokens=48, threads=1, max_held_bytes=max_held_bytes)
    return TransformersPrefillEngine(path, 2048, options)


def kv(engine: TransformersPrefillEngine, tokens: list[int], start: int = 0) -> tuple[int, list[torch.Tensor]]:
    """Tokens that were held, and the emitted keys of each layer, [heads, rows * dim]; asserts that every row from
    `start` on that the layout keeps was emitted once."""
    blocks: list[Any] = []
    run = engine.start(tokens, blocks.append, start=start)
    while not run.done:
        run.step()
    run.close()
    assert run.timing.tokens == len(tokens) - run.held
    keys = []
    for index, layer in enumerate(engine.info.layout.layers):
        mine = [block for block in blocks if block.layer == index]
        assert [row for block in mine for row in range(block.start, block.end)] == list(layer.rows(len(tokens), start))
        heads = [b"".join(bytes(block.keys[head]) for block in mine) for head in range(layer.kv_heads)]
        keys.append(torch.stack([torch.frombuffer(bytearray(head), dtype=torch.float32) for head in heads]))
    return run.held, keys


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3_text", "mistral_windowed"])
@pytest.mark.parametrize(
    ("first", "second", "start"), [(200, 333, 0), (200, 333, 150), (200, 333, 320), (100, 100, 30)]
)
def test_the_rest_of_a_prompt_is_computed_as_if_all_of_it_were(
    tiny: TinyModel, architecture: str, first: int, second: int, start: int
) -> None:
    alone, sharing = engine_on(tiny(architecture), 0), engine_on(tiny(architecture))
    tokens = prompt(second)
    kv(sharing, tokens[:first])
    assert sharing.held_bytes > 0 == alone.held_bytes
    held_tokens, got = kv(sharing, tokens, start)
    computed_all, want = kv(alone, tokens, start)
    assert (held_tokens, computed_all) == (first, 0)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("architecture", "held_tokens"), [("llama", 150), ("gpt_oss", 0)])
def test_a_prompt_that_differs_in_the_middle_shares_what_its_layers_allow(
    tiny: TinyModel, architecture: str, held_tokens: int
) -> None:
    alone, sharing = engine_on(tiny(architecture), 0), engine_on(tiny(architecture))
    tokens = [*prompt(150), *prompt(200, seed=2)]
    kv(sharing, prompt(150) + prompt(500, seed=3))
    shared, got = kv(sharing, tokens)
    assert shared == held_tokens
    for mine, theirs in zip(got, kv(alone, tokens)[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_an_answer_is_the_same_with_a_held_prompt(tiny: TinyModel, architecture: str) -> None:
    sharing = engine_on(tiny(architecture))
    tokens, sampling = prompt(300), Sampling(max_tokens=48, temperature=0.7, seed=5)
    before = [token.id for token in sharing.generate(tokens, sampling)]
    kv(sharing, tokens[:200])
    run = sharing.start_answer(AnswerRequest(tokens, sampling), lambda token: None)
    assert run.held == 200
    assert [token.id for token in sharing.generate(tokens, sampling)] == before


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_prompt_that_parts_from_a_held_one_shortly_before_its_end_shares_the_rest(
    tiny: TinyModel, architecture: str
) -> None:
    alone, sharing = engine_on(tiny(architecture), 0), engine_on(tiny(architecture))
    kv(sharing, prompt(200))
    tokens = [*prompt(190), *prompt(30, seed=2)]
    shared, got = kv(sharing, tokens)
    assert shared == 190
    for mine, theirs in zip(got, kv(alone, tokens)[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


def test_prompts_that_begin_alike_hold_those_rows_once(tiny: TinyModel) -> None:
    sharing = engine_on(tiny("llama"))
    kv(sharing, prompt(200))
    assert sharing.held_bytes == sharing.info.layout.nbytes(200)
    for seed in (2, 3):
        kv(sharing, [*prompt(150), *prompt(50, seed)])
    assert sharing.held_bytes == sharing.info.layout.nbytes(200 + 2 * 50)


def test_prompts_with_another_salt_share_nothing(tiny: TinyModel) -> None:
    sharing = engine_on(tiny("llama"))
    held = []
    for salt in ("one", "other", "one"):
        run = sharing.start(prompt(100), lambda block: None, salt=salt)
        while not run.done:
            run.step()
        held.append(run.held)
    assert held == [0, 0, 100]


def test_the_least_recently_used_makes_room_and_a_prompt_beyond_the_limit_is_not_held(tiny: TinyModel) -> None:
    path = tiny("llama")
    nbytes = engine_on(path).info.layout.nbytes(100)
    sharing = engine_on(path, 2 * nbytes)
    for seed in (1, 2, 1, 3):
        kv(sharing, prompt(100, seed))
    kv(sharing, prompt(201, seed=4))
    assert sharing.held_bytes == 2 * nbytes
    assert [kv(sharing, prompt(100, seed))[0] for seed in (1, 3)] == [100, 100]
    assert kv(sharing, prompt(100, seed=2))[0] == 0


def test_a_prompt_is_complete_also_if_there_is_no_memory_to_hold_it(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sharing = engine_on(tiny("llama"))
    monkeypatch.setattr(PreallocatedCache, "rows", fail)
    assert kv(sharing, prompt(100))[0] == 0
    assert sharing.held_bytes == 0 and "could not be held: CUDA out of memory" in caplog.text


def test_held_rows_stay_as_they_are_while_other_prompts_are_computed(tiny: TinyModel) -> None:
    sharing = engine_on(tiny("gpt_oss"))
    tokens = prompt(200)
    kv(sharing, tokens)
    held = present(sharing._held.find(tokens, salted("", None)))
    prefix = held.read()
    pairs = [*present(prefix.snapshot).layers, *(layer for rows in prefix.rows for layer in rows.layers)]
    tensors = [tensor for pair in pairs for tensor in pair or ()]
    before = [tensor.clone() for tensor in tensors]
    kv(sharing, [*tokens, *prompt(300, seed=4)])
    assert len(tensors) == 2 * len(sharing.info.layout.layers)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_without_enough_memory_held_prompts_are_given_up_and_the_prompt_fails_as_such(
    tiny: TinyModel, error: Exception
) -> None:
    sharing = engine_on(tiny("llama"))
    kv(sharing, prompt(100))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    layer = sharing._model.model.layers[0]
    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(ModelError, match="not enough memory for 133 tokens"):
        kv(sharing, prompt(133))
    hook.remove()
    assert sharing.held_bytes == 0
    assert kv(sharing, prompt(133))[0] == 0


def test_holding_nothing_is_an_option(tiny: TinyModel) -> None:
    engine = engine_on(tiny("llama"), 0)
    assert [kv(engine, prompt(100))[0] for _ in range(2)] == [0, 0]
    assert dataclasses.replace(EngineOptions("transformers")).max_held_bytes == 2 << 30
