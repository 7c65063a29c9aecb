"""Several groups in one engine: the same answers, less padding, one bound and one account over all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator

from disagg.api.layout import Layout
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest
from disagg.engines.mlx import groups as mlx_groups
from disagg.engines.mlx import passes
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.errors import ModelError
from disagg.kv.received import ReceivedKV
from tests.deadlines import wait_until
from tests.engines.mlx.mlx_parts import Collector, References, counting, held_up, prompt, start
from tests.tiny_models import TinyModel

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=256, max_batch=6)
LENGTHS = (3, 1200, 5, 1300, 40, 2600)


@pytest.fixture
def engine(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[MLXDecodeEngine]:
    """An engine to which a pass costs only its weights: 695 tokens of padding."""
    monkeypatch.setattr(mlx_groups, "_LAYER_BYTES", 0)
    engine = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS)
    yield engine
    wait_until(lambda: (engine.running, engine.kv_bytes, engine._batch._groups) == (0, 0, []))
    engine.close()


@pytest.fixture(scope="module")
def kv_of(reference: References) -> Callable[[int, Layout], ReceivedKV]:
    """The KV of all but the last of so many prompt tokens."""
    return lru_cache(lambda length, layout: reference("llama").kv(prompt(length, seed=length)[:-1], layout))


@pytest.fixture
def submit(engine: MLXDecodeEngine, kv_of: Callable[[int, Layout], ReceivedKV]) -> Callable[..., Collector]:
    """Start a request of so many prompt tokens over handed-over KV."""

    def submit(length: int, *, id: str | None = None, **sampling: Any) -> Collector:
        tokens = prompt(length, seed=length)
        kv = kv_of(length, engine.info.layout)
        if id is None:
            return start(engine, tokens, kv, **sampling)
        collector = Collector()
        engine.submit(DecodeRequest(id, tokens, Sampling(ignore_eos=True, **sampling), kv), collector)
        return collector

    return submit


def groups(engine: Any) -> list[list[int]]:
    """Prompt lengths by group, as the engine's own thread sees them."""
    batch = engine._batch
    lengths: list[list[int]] = engine.call(lambda _: [[row.context for row in group.rows] for group in batch._groups])
    return lengths


def sizes(engine: Any) -> list[int]:
    return [len(group) for group in groups(engine)]


def test_sequences_of_unlike_lengths_answer_as_they_do_alone(
    engine: MLXDecodeEngine, submit: Callable[..., Collector], reference: References
) -> None:
    with held_up(engine):
        handed_over = [submit(length, max_tokens=40) for length in LENGTHS[:4]]
        computed = [start(engine, prompt(length, seed=length), max_tokens=40) for length in LENGTHS[4:]]
    assert sizes(engine) == [3, 2, 1]

    for length, collector in zip(LENGTHS, (*handed_over, *computed), strict=True):
        tokens, answer = prompt(length, seed=length), collector.result()
        assert answer == reference("llama").greedy(tokens, 40, draft=answer)


def test_a_long_sequence_costs_the_short_ones_no_padding(
    engine: MLXDecodeEngine, submit: Callable[..., Collector]
) -> None:
    with held_up(engine):
        long = submit(2600, max_tokens=100)
        shorts = [submit(5 + i, max_tokens=100) for i in range(5)]
    for collector in (long, *shorts):
        assert collector.first.wait(60)
    one = engine.info.layout.nbytes(2600)

    assert one < engine.kv_bytes < 2 * one, "one BatchGenerator would take six times as much"
    for collector in (long, *shorts):
        assert len(collector.result()) == 100


def test_every_group_takes_one_step_per_turn(engine: MLXDecodeEngine, submit: Callable[..., Collector]) -> None:
    with held_up(engine):
        long, short = submit(2600, max_tokens=150), submit(5, max_tokens=150)
    assert long.first.wait(60) and short.first.wait(60)
    ahead = engine.call(lambda _: len(long.tokens) - len(short.tokens))
    for _ in range(20):
        assert engine.call(lambda _: len(long.tokens) - len(short.tokens)) == ahead
    assert len(long.result()) == len(short.result()) == 150


def test_one_bound_holds_over_all_groups_and_waiting_requests_are_counted(
    engine: MLXDecodeEngine, submit: Callable[..., Collector]
) -> None:
    with held_up(engine):
        running = [submit(length, max_tokens=200) for length in LENGTHS]
    for collector in running:
        assert collector.first.wait(60)
    waiting, cancelled = submit(1250, max_tokens=5), submit(7, id="waiting", max_tokens=5)
    batch = engine._batch
    outside = engine.call(lambda _: batch.nbytes - sum(group.nbytes for group in batch._groups))
    assert outside == engine.info.layout.nbytes(1249) + engine.info.layout.nbytes(6)
    assert sum(sizes(engine)) == OPTIONS.max_batch and engine.running == OPTIONS.max_batch + 2
    assert not waiting.first.is_set()
    engine.cancel("waiting")

    assert len(waiting.result()) == 5
    assert not cancelled.tokens
    for collector in running:
        assert len(collector.result()) == 200


def test_a_group_goes_with_its_last_sequence_whether_that_ends_or_is_cancelled(
    engine: MLXDecodeEngine, submit: Callable[..., Collector]
) -> None:
    with held_up(engine):
        short, middle = submit(5, max_tokens=400), submit(1200, max_tokens=20)
        submit(2600, id="long", max_tokens=400)
    assert sizes(engine) == [1, 1, 1]
    middle.result()
    (one,), (other,) = groups(engine)
    assert one < 1000 and other >= 2600
    engine.cancel("long")

    assert sizes(engine) == [1]
    assert len(short.result()) == 400


def test_a_failing_step_of_one_group_fails_all_requests_and_the_engine_goes_on(
    engine: MLXDecodeEngine, submit: Callable[..., Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(engine):
        running = [submit(length, max_tokens=2000) for length in (*LENGTHS, 9)]
    for collector in running[:6]:
        assert collector.first.wait(60)

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BatchGenerator, "next", fail)
    for collector in running:
        with pytest.raises(ModelError, match="a decode step failed: RuntimeError: out of memory"):
            collector.result()
    assert len(submit(20, max_tokens=3).result()) == 3


def test_prompts_in_several_groups_share_one_chunk_per_step(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine._backend.loaded.model
    fed: list[int] = []
    original = type(model).__call__
    monkeypatch.setattr(type(model), "__call__", counting(original, fed))
    monkeypatch.setattr(passes, "CHUNK_S", 1e9)  # chunks stay as long as they are, however slow a step is
    with held_up(engine):
        collectors = [start(engine, prompt(length, seed=length), max_tokens=2) for length in (2600, 800)]
    for collector in collectors:
        collector.result()
    side_by_side = [size for size in fed if size > 2]

    assert side_by_side.count(OPTIONS.chunk_tokens // 2) >= 12, "six of the shorter prompt, six of the other"


def test_memory_stays_wired_until_the_last_group_and_the_batch_are_gone(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every generator puts back the limit it found. On a machine without a GPU a number stands for the limit."""
    limit = [0]

    def recommended() -> int:
        before, limit[0] = limit[0], 100
        return before

    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "maybe_set_recommended_wired_limit", recommended)
    monkeypatch.setattr(mlx_groups, "maybe_set_recommended_wired_limit", recommended)
    monkeypatch.setattr("mlx.core.set_wired_limit", lambda value: limit.__setitem__(0, value))
    engine.call(lambda _: setattr(engine, "_batch", engine._backend.new_batch()))
    for tokens in (5, 2600):
        start(engine, prompt(tokens), max_tokens=tokens // 100 + 1)
    wait_until(lambda: engine.running == 0)
    assert limit == [100]
    engine.close()
    assert limit == [0]
