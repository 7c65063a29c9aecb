"""disagg/engines/transformers/prefixes.py: what is shared, as a table; and that sharing changes no row and no token."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.engines.transformers.prefixes import LEAST_TOKENS, HeldPrompt, HeldRows, Prefixes
from disagg.errors import ModelError
from tests import tiny_models
from tests.tiny_models import TinyModel

W = tiny_models.WINDOW
TOKENS = list(range(1000, 1200))


def rows(first: int, window: int | None = None) -> HeldRows:
    """The rows from `first` to the end of TOKENS."""
    empty = torch.empty(1, 1, len(TOKENS) - first, 1)
    return HeldRows(first, empty, empty, window)


def held(*layers: HeldRows, salt: str = "", tokens: Sequence[int] = TOKENS) -> HeldPrompt:
    return HeldPrompt.of(salt, tokens, layers)


FULL, WRAPPED, SPARE, SHORT = rows(0), rows(200 - 64, 64), rows(200 - 80, 64), rows(0, 256)


@pytest.mark.parametrize(
    ("layers", "tokens", "shared"),
    [
        pytest.param([FULL], [*TOKENS, 1], 200, id="all of it"),
        pytest.param([FULL], TOKENS, 200, id="the same prompt"),
        pytest.param([FULL], [*TOKENS[:150], 1, 2], 150, id="full layers up to any token"),
        pytest.param([FULL], TOKENS[:150], 150, id="a shorter prompt"),
        pytest.param([FULL], [1, *TOKENS], 0, id="another beginning"),
        pytest.param([FULL, WRAPPED], [*TOKENS, 1], 200, id="a sliding layer at its end"),
        pytest.param([FULL, WRAPPED], TOKENS, 200, id="a sliding layer of the same prompt"),
        pytest.param([FULL, WRAPPED], [*TOKENS[:199], 1], 199, id="one token earlier its window still has every row"),
        pytest.param([FULL, WRAPPED], TOKENS[:199], 0, id="but not the row that a prompt of that length is to send"),
        pytest.param([FULL, WRAPPED], [*TOKENS[:198], 1], 0, id="earlier than that it has not"),
        pytest.param([FULL, SPARE], [*TOKENS[:184], 1], 184, id="spare rows allow earlier ends"),
        pytest.param([FULL, SPARE], [*TOKENS[:182], 1], 0, id="as many as there are"),
        pytest.param([FULL, SHORT], [*TOKENS[:70], 1], 70, id="a window that was never full"),
        pytest.param([FULL], [*TOKENS[: LEAST_TOKENS - 1], 1], 0, id="too few to be worth it"),
    ],
)
def test_what_is_shared(layers: list[HeldRows], tokens: list[int], shared: int) -> None:
    prefixes = Prefixes(1 << 30)
    prefixes.keep(held(*layers))
    found = prefixes.find("", tokens)
    assert (found[1] if found else 0) == shared


def test_prompts_with_another_salt_share_nothing() -> None:
    prefixes = Prefixes(1 << 30)
    prefixes.keep(held(FULL, salt="one"))
    assert prefixes.find("one", TOKENS) and not prefixes.find("other", TOKENS) and not prefixes.find("", TOKENS)


def test_the_longest_shared_prompt_is_found() -> None:
    prefixes = Prefixes(1 << 30)
    for end in (100, 200, 150):
        prefixes.keep(held(FULL, WRAPPED, tokens=[*TOKENS[:end], end]))
    assert [prompt.tokens[-1] for prompt, _ in [prefixes.find("", [*TOKENS, 200]) or (held(FULL), 0)]] == [200]


def test_the_least_recently_used_prompt_makes_room_and_one_that_is_too_large_is_not_held() -> None:
    one, two, three = (held(FULL, tokens=[first, *TOKENS]) for first in (1, 2, 3))
    prefixes = Prefixes(2 * one.nbytes)
    prefixes.keep(one)
    prefixes.keep(two)
    assert prefixes.find("", one.tokens.tolist())
    prefixes.keep(three)
    assert [bool(prefixes.find("", each.tokens.tolist())) for each in (one, two, three)] == [True, False, True]
    assert prefixes.nbytes == 2 * one.nbytes
    nothing = Prefixes(one.nbytes - 1)
    nothing.keep(one)
    assert nothing.nbytes == 0


def test_a_longer_prompt_takes_the_place_of_the_one_that_it_can_stand_for() -> None:
    prefixes = Prefixes(1 << 30)
    short, long = held(FULL, tokens=TOKENS[:100]), held(FULL)
    prefixes.keep(short)
    prefixes.keep(long)
    assert prefixes.nbytes == long.nbytes


def test_a_longer_prompt_does_not_stand_for_one_whose_window_it_has_left() -> None:
    prefixes = Prefixes(1 << 30)
    short, long = held(FULL, rows(36, 64), tokens=TOKENS[:100]), held(FULL, WRAPPED)
    prefixes.keep(short)
    prefixes.keep(long)
    assert prefixes.nbytes == short.nbytes + long.nbytes


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
    run = sharing.start_answer(tokens, sampling, lambda token: None)
    assert run.held == 200
    assert [token.id for token in sharing.generate(tokens, sampling)] == before


def test_held_rows_stay_as_they_are_while_other_prompts_are_computed(tiny: TinyModel) -> None:
    sharing = engine_on(tiny("gpt_oss"))
    tokens = prompt(200)
    kv(sharing, tokens)
    (one,) = sharing._prefixes._held
    before = [(layer.keys.clone(), layer.values.clone()) for layer in one.layers]
    kv(sharing, [*tokens, *prompt(300, seed=4)])
    for layer, (keys, values) in zip(one.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


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
