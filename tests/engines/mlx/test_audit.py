"""Received KV is audited on the engine's thread: what is found, and that nothing of it is used.

tests/hostile/ has the lies of other engines; here KV is changed in the memory that it was received into.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeRequest
from disagg.engines.base.audit import FIRST, LAST, AuditBounds, bounds, plan
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import groups
from disagg.engines.mlx.audit import audit
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.errors import KVRefuted
from disagg.kv.received import ReceivedKV
from tests.deadlines import wait_until
from tests.engines.mlx.mlx_parts import Collector, Engines, References, held_up, prompt, start
from tests.tiny_models import WINDOW

LIMITS = bounds("float32", "as-is", same_weights=True)
MODELS = ["llama", "gemma3_text"]  # full, mostly sliding
Change = Callable[[list[Any]], None]


def submit(
    engine: MLXDecodeEngine, tokens: Sequence[int], kv: ReceivedKV, limits: AuditBounds | None = LIMITS, **more: Any
) -> Collector:
    collector = Collector()
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    engine.submit(DecodeRequest(f"audit-{id(collector)}", list(tokens), sampling, kv, audit=limits, **more), collector)
    return collector


def keys_of(kv: ReceivedKV) -> list[Any]:
    """Per layer, the keys as [heads, rows, dim], in the memory that they were received into."""
    layers = zip(kv.keys, kv.layout.layers, strict=True)
    return [planes[0].view(np.float32).reshape(layer.kv_heads, -1, layer.key_dim) for planes, layer in layers]


def state_of(caches: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Everything that a request's caches have, as values."""
    found = []
    for cache in caches:
        arrays = tuple(np.array(array).tobytes() for array in (cache.keys, cache.values))
        rest = (cache.keys.shape, cache.offset, cache.step, getattr(cache, "_idx", None), type(cache))
        found.append((*arrays, *rest))
    return found


@pytest.mark.parametrize("length", [2, 9, WINDOW + 1, WINDOW + 40])
@pytest.mark.parametrize("model", MODELS)
def test_an_audit_leaves_the_caches_of_a_request_as_they_are(
    model: str, length: int, mlx_engine: Engines, reference: References
) -> None:
    engine, tokens = mlx_engine(model), prompt(length)
    kv = reference(model).kv(tokens[:-1], engine.info.layout)

    def audited(backend: Any) -> tuple[Any, Any, int]:
        loaded = backend.loaded.model
        caches = mlx_cache.build(loaded, kv)
        before = state_of(caches)
        found = audit(loaded, caches, tokens[:-1], plan(kv.layout, 0, kv.tokens))
        return before, state_of(caches), found.tokens

    before, after, count = engine.call(audited)
    assert before == after
    beyond = any(layer.window for layer in engine.info.layout.layers)
    full = min(LAST, length - 1)
    assert count == (FIRST + 1 if beyond and length - 1 > WINDOW else full)


@pytest.mark.parametrize("model", MODELS)
def test_honest_kv_is_accepted_and_counted_apart_from_what_is_computed(
    model: str, mlx_engine: Engines, reference: References
) -> None:
    engine, tokens = mlx_engine(model), prompt(150)
    running = submit(engine, tokens, reference(model).kv(tokens[:-1], engine.info.layout))
    assert running.result() == reference(model).greedy(tokens, 8, draft=running.ids)
    timing = running.timing
    assert timing.computed_prompt_tokens == 1 and timing.audit is not None and timing.audit.tokens >= LAST
    assert 0 < timing.audit.share(LIMITS) < 0.1 and 0 < timing.audit_s <= timing.ingested - timing.started


def _nan_early(keys: list[Any]) -> None:
    keys[1][0, 3, 0] = np.nan


def _first_layer(keys: list[Any]) -> None:
    keys[0][:, 40] *= -1


@pytest.mark.parametrize(
    ("change", "where", "of_received"),
    [(_nan_early, "are no numbers", False), (_first_layer, "of the first layer", True)],
)
def test_a_single_wrong_row_anywhere_that_tokens_attend_to_is_found(
    change: Change, where: str, of_received: bool, mlx_engine: Engines, reference: References
) -> None:
    engine, tokens = mlx_engine("llama"), prompt(100)
    kv = reference("llama").kv(tokens[:-1], engine.info.layout)
    change(keys_of(kv))
    with pytest.raises(KVRefuted, match=where) as raised:
        submit(engine, tokens, kv).result()
    assert raised.value.of_received is of_received


def test_refuted_kv_leaves_nothing_behind_and_the_engine_goes_on(mlx_engine: Engines, reference: References) -> None:
    engine, tokens = mlx_engine("llama"), prompt(100)
    engine.give_up_held(engine.held_bytes)
    kv = reference("llama").kv(tokens[:-1], engine.info.layout)
    keys_of(kv)[1][:] = 0
    with pytest.raises(KVRefuted):
        submit(engine, tokens, kv, hold_prompt=True).result()
    assert (engine.running, engine.kv_bytes, engine.held_bytes) == (0, 0, 0)
    assert start(engine, tokens).result() == reference("llama").greedy(tokens)


@pytest.mark.parametrize("model", MODELS)
def test_after_a_held_prefix_only_what_was_received_is_compared(
    model: str, mlx_engine: Engines, reference: References
) -> None:
    engine, first = mlx_engine(model), prompt(150)
    start(engine, first).result()
    for wrong in (False, True):
        second = [*first, *prompt(60, seed=2 + wrong)]
        held = engine.find_held(second, "")
        assert held is not None
        kv = reference(model).kv(second[:-1], engine.info.layout, held.tokens)
        if wrong:
            keys_of(kv)[2][:] = 0
        running = submit(engine, second, kv, held=held)
        if wrong:
            with pytest.raises(KVRefuted, match="layer 2"):
                running.result()
        else:
            assert running.result() == reference(model).greedy(second, 8, draft=running.ids)
        held.release()
    engine.give_up_held(engine.held_bytes)


def test_what_is_held_of_a_prompt_can_be_forgotten(mlx_engine: Engines) -> None:
    engine, tokens = mlx_engine("llama"), prompt(90)
    start(engine, tokens).result()
    used = engine.find_held([*tokens, 9], "")
    assert used is not None
    engine.forget_held([*tokens, 9], "other salt")
    assert engine.held_bytes
    engine.forget_held([*tokens, 9], "")
    assert engine.find_held([*tokens, 9], "") is None and engine.held_bytes == 0
    assert start(engine, [*tokens, 9]).result()
    used.release()
    engine.give_up_held(engine.held_bytes)


def test_kv_is_used_if_its_audit_fails(
    mlx_engine: Engines, reference: References, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1000 bytes.")

    engine, tokens = mlx_engine("llama"), prompt(50)
    monkeypatch.setattr(groups, "audit", out_of_memory)
    with caplog.at_level(logging.ERROR):
        running = submit(engine, tokens, reference("llama").kv(tokens[:-1], engine.info.layout))
        assert running.result() == reference("llama").greedy(tokens, 8)
    assert running.timing.audit is None and "could not be audited" in caplog.text


@pytest.mark.parametrize("model", MODELS)
def test_answers_of_one_batch_are_the_same_to_the_bit_with_and_without_audits(
    model: str, mlx_engine: Engines, reference: References
) -> None:
    engine = mlx_engine(model)
    asked = [prompt(60 + 9 * number, seed=number) for number in range(4)]
    received = [reference(model).kv(tokens[:-1], engine.info.layout) for tokens in asked]

    def answers(audited: Sequence[int]) -> list[list[tuple[int, float]]]:
        collectors = []
        with held_up(engine):
            for number, (tokens, kv) in enumerate(zip(asked, received, strict=True)):
                sampling = Sampling(max_tokens=12, ignore_eos=True, temperature=number % 2, seed=number)
                limits = LIMITS if number in audited else None
                collectors.append(Collector())
                request = DecodeRequest(f"bits-{number}", tokens, sampling, kv, audit=limits)
                engine.submit(request, collectors[-1])
        for collector in collectors:
            collector.result()
        wait_until(lambda: not engine.running)
        engine.give_up_held(engine.held_bytes)
        return [[(token.id, token.logprob) for token in collector.tokens] for collector in collectors]

    assert answers(range(4)) == answers(()) == answers([1])


def test_an_engine_that_has_been_warmed_up_can_audit(mlx_engine: Engines) -> None:
    engine = mlx_engine("gemma3_text")
    assert not engine.info.audits
    engine.warm_up()
    assert engine.info.audits and not engine.info.mixture
