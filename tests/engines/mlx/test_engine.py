"""How requests live and end in the engine: stop, length, cancel, failure, close, counters, sampling in company."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest
from disagg.engines.decoding import DecodeBounds
from disagg.engines.mlx import memory as mlx_memory
from disagg.engines.mlx import passes as mlx_chunk
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.memory import MAX_CACHE_BYTES
from disagg.engines.process import COMPUTE_NICE
from disagg.errors import Cancelled, ModelError, Overloaded, RequestError
from tests.deadlines import wait_until
from tests.engines.mlx.mlx_parts import Collector, Engines, References, counting, held_up, prompt, start
from tests.tiny_models import VOCAB, TinyModel

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=32, max_batch=4)
WARM: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 24}


def idle(engine: MLXDecodeEngine) -> bool:
    return (engine.running, engine.kv_bytes) == (0, 0)


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[MLXDecodeEngine]:
    """A small batch of its own, idle after every test."""
    engine = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def left_idle(engine: MLXDecodeEngine) -> Iterator[None]:
    yield
    engine.bounds = DecodeBounds()
    wait_until(lambda: idle(engine))


def test_an_answer_ends_at_max_tokens_with_one_call_per_step(engine: MLXDecodeEngine) -> None:
    collector = start(engine, prompt(20), max_tokens=7)

    assert len(collector.result()) == 7
    assert [token.finish for token in collector.tokens] == [None] * 6 + ["length"]
    assert collector.calls == [1] * 7


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a nice value is the whole process's")
def test_on_a_cpu_the_other_threads_have_a_core_before_those_that_compute(tiny: TinyModel) -> None:
    def nice() -> dict[str, int]:
        return {one.name: os.getpriority(os.PRIO_PROCESS, int(one.name)) for one in Path("/proc/self/task").iterdir()}

    before = nice()
    engine = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS)
    try:
        started = {thread: value for thread, value in nice().items() if thread not in before}
        lowered = max(COMPUTE_NICE, os.getpriority(os.PRIO_PROCESS, 0))
        assert len(started) >= 2 and set(started.values()) == {lowered}, "the engine's thread, and those of MLX"
        here = os.sched_getscheduler(0)
        policy = os.SCHED_BATCH if here == os.SCHED_OTHER else here
        assert {os.sched_getscheduler(int(thread)) for thread in started} == {policy}
    finally:
        engine.close()


@pytest.fixture
def after_step(engine: MLXDecodeEngine) -> Iterator[Callable[..., None]]:
    """Sets what the engine calls after each step."""
    yield engine.after_step
    engine.after_step(lambda: None)


def test_after_step_is_called_once_after_all_listeners(
    engine: MLXDecodeEngine, after_step: Callable[..., None]
) -> None:
    seen: list[list[int]] = []
    with held_up(engine):
        collectors = [start(engine, prompt(20 + i), max_tokens=6) for i in range(3)]
        after_step(lambda: seen.append([len(collector.tokens) for collector in collectors]))
    for collector in collectors:
        collector.result()
    wait_until(lambda: len(seen) == 6)

    assert seen == [[n] * 3 for n in range(1, 7)]


def test_if_after_step_raises_the_requests_of_the_batch_fail_and_the_engine_goes_on(
    engine: MLXDecodeEngine, after_step: Callable[..., None]
) -> None:
    def fail() -> None:
        raise RuntimeError("the event loop is closed")

    after_step(fail)
    with pytest.raises(ModelError, match="the event loop is closed"):
        start(engine, prompt(20), max_tokens=5000).result()
    after_step(lambda: None)
    assert len(start(engine, prompt(20), max_tokens=3).result()) == 3


@pytest.fixture
def eos_engine(tiny: TinyModel, engine: MLXDecodeEngine) -> Iterator[tuple[MLXDecodeEngine, list[int]]]:
    """An engine whose end-of-sequence token is the 5th that the model says to prompt(20)."""
    greedy = start(engine, prompt(20), max_tokens=8).result()
    assert greedy[4] not in greedy[:4]
    ending = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS)
    ending._backend.info = replace(ending._backend.info, eos_ids=frozenset({greedy[4]}))
    ending.call(lambda model: setattr(ending, "_batch", ending._backend.new_batch()))
    yield ending, greedy
    ending.close()


def test_an_end_of_sequence_token_stops_the_answer_unless_it_is_ignored(
    eos_engine: tuple[MLXDecodeEngine, list[int]],
) -> None:
    engine, greedy = eos_engine
    stopped = start(engine, prompt(20), max_tokens=8, ignore_eos=False)
    ignored = start(engine, prompt(20), max_tokens=8)

    assert stopped.result() == greedy[:5]
    assert stopped.tokens[-1].finish == "stop"
    assert ignored.result() == greedy


def test_the_moments_of_a_request_are_in_order(engine: MLXDecodeEngine, reference: References) -> None:
    tokens = prompt(50)
    before = time.monotonic()
    collector = start(engine, tokens, reference("llama").kv(tokens[:-1], engine.info.layout), max_tokens=5)
    collector.result()

    timing = collector.timing
    moments = [before, timing.submitted, timing.started, timing.ingested, timing.first_token, collector.finished]
    assert moments == sorted(moments)
    assert timing.first_token < collector.finished


def test_waiting_for_a_busy_thread_is_over_when_a_request_starts_and_no_part_of_its_ingest(
    engine: MLXDecodeEngine, reference: References
) -> None:
    tokens = prompt(50)
    kv = reference("llama").kv(tokens[:-1], engine.info.layout)
    with held_up(engine):
        collector = start(engine, tokens, kv, max_tokens=2)
        released = time.monotonic()
    collector.result()

    timing = collector.timing
    assert timing.submitted <= released <= timing.started <= timing.ingested


def test_the_model_itself_sees_one_prompt_token_after_a_hand_off_and_all_of_them_alone(
    engine: MLXDecodeEngine, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's counter against the shapes that really go into the model. Generation runs one step ahead: an
    answer of n tokens takes the last prompt token and n generated ones."""
    model = engine._backend.loaded.model
    fed: list[int] = []
    original = type(model).__call__
    monkeypatch.setattr(type(model), "__call__", counting(original, fed))
    tokens = prompt(75)

    handed_over = start(engine, tokens, reference("llama").kv(tokens[:-1], engine.info.layout), max_tokens=3)
    handed_over.result()
    assert sum(fed) - 3 == handed_over.timing.computed_prompt_tokens == 1

    fed.clear()
    alone = start(engine, tokens, max_tokens=3)
    alone.result()
    assert sum(fed) - 3 == alone.timing.computed_prompt_tokens == 75


def test_seeds_reproduce_an_answer_whatever_else_runs(engine: MLXDecodeEngine) -> None:
    by_itself = start(engine, prompt(20), seed=11, **WARM).result()
    neighbours = [start(engine, prompt(9 + i, seed=i), seed=i, max_tokens=40, temperature=1.3) for i in range(2)]
    for neighbour in neighbours:
        assert neighbour.first.wait(60)
    in_company = start(engine, prompt(20), seed=11, **WARM).result()
    other_seed = start(engine, prompt(20), seed=12, **WARM).result()

    assert by_itself == in_company != other_seed
    for neighbour in neighbours:
        neighbour.result()


def test_greedy_and_sampled_requests_share_a_batch_without_disturbing_each_other(engine: MLXDecodeEngine) -> None:
    alone = start(engine, prompt(20), max_tokens=24).result()
    sampled = start(engine, prompt(30), seed=1, **WARM)
    greedy = start(engine, prompt(20), max_tokens=24)

    assert greedy.result() == alone
    assert sampled.result() != alone


def test_log_probabilities_are_the_models_own_even_under_a_penalty(
    engine: MLXDecodeEngine, reference: References
) -> None:
    tokens = prompt(20)
    for penalty in (1.0, 1.4):
        collector = start(engine, tokens, max_tokens=6, logprobs=3, repetition_penalty=penalty)
        answer = collector.result()
        logits = reference("llama").logits([*tokens, *answer[:-1]], 6).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for token, row in zip(collector.tokens, expected, strict=True):
            assert token.logprob == pytest.approx(row[token.id], abs=1e-3)
            assert [i for i, _ in token.top] == np.argsort(-row)[:3].tolist()
            assert [p for _, p in token.top] == pytest.approx(np.sort(row)[:-4:-1].tolist(), abs=1e-3)


def test_a_repetition_penalty_keeps_tokens_from_coming_back(engine: MLXDecodeEngine) -> None:
    plain = start(engine, prompt(20), max_tokens=40).result()
    strict = start(engine, prompt(20), max_tokens=40, repetition_penalty=10.0).result()

    assert len(set(plain)) < 40
    assert len(set(strict)) == 40


def test_more_requests_than_places_wait_their_turn(engine: MLXDecodeEngine) -> None:
    collectors = [start(engine, prompt(10 + i, seed=i), max_tokens=12) for i in range(11)]
    answers = [collector.result() for collector in collectors]

    assert answers == [start(engine, prompt(10 + i, seed=i), max_tokens=12).result() for i in range(11)]


def test_kv_bytes_count_the_engines_own_caches_and_not_what_its_receiver_counts(
    engine: MLXDecodeEngine, reference: References
) -> None:
    tokens = prompt(100)
    kv = reference("llama").kv(tokens[:-1], engine.info.layout)
    with held_up(engine):
        collector = start(engine, tokens, kv, max_tokens=200)
        assert engine.kv_bytes == 0

    assert collector.first.wait(60)
    assert engine.kv_bytes >= kv.nbytes
    collector.result()
    assert idle(engine), "everything is let go before the last token is handed out"


def test_cancelling_at_random_moments_leaves_nothing_behind(engine: MLXDecodeEngine, reference: References) -> None:
    rng = random.Random(3)
    layout, torch_model = engine.info.layout, reference("llama")
    prompts = [prompt(length, seed=length) for length in (1, 3, 40, 90, 200)]
    kvs = [torch_model.kv(tokens[:-1], layout) for tokens in prompts]
    for index in range(60):
        which = rng.randrange(5)
        collector = Collector()
        sampling = Sampling(max_tokens=500, ignore_eos=True, temperature=rng.choice([0.0, 1.0]))
        kv = kvs[which] if rng.random() < 0.6 else None
        engine.submit(DecodeRequest(f"c{index}", prompts[which], sampling, kv), collector)
        if rng.random() < 0.5:
            collector.first.wait(rng.random() * 0.05)
        engine.cancel(f"c{index}")
        heard = len(collector.tokens)
        if index % 10 == 0:
            wait_until(lambda: idle(engine), seconds=5.0)
        assert len(collector.tokens) == heard, "no call begins after cancel returned"
        assert collector.error is None
    wait_until(lambda: idle(engine), seconds=5.0)
    assert len(start(engine, prompts[2], kvs[2], max_tokens=5).result()) == 5


def test_a_token_computed_while_its_request_was_cancelled_is_not_handed_out(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, step = Collector(), engine._batch.step

    def step_then_cancel() -> Any:
        handed_out = step()
        if len(collector.tokens) == 2:
            engine.cancel("late")
        return handed_out

    monkeypatch.setattr(engine._batch, "step", step_then_cancel)
    engine.submit(DecodeRequest("late", prompt(5), Sampling(max_tokens=50, ignore_eos=True)), collector)
    wait_until(lambda: len(collector.tokens) == 2)
    wait_until(lambda: idle(engine))

    assert len(collector.tokens) == 2


def test_a_cancelled_request_counts_as_dropped_only_when_its_row_has_left_the_batch(engine: MLXDecodeEngine) -> None:
    running, dropped = Collector(), threading.Event()
    engine.submit(DecodeRequest("leaving", prompt(5), Sampling(max_tokens=5000, ignore_eos=True)), running)
    assert running.first.wait(60)
    with held_up(engine):
        engine.cancel("leaving", dropped.set)
        assert len(engine._batch) == 1 and not dropped.is_set()
    assert dropped.wait(60)
    wait_until(lambda: idle(engine))


@pytest.mark.parametrize("closed", [False, True])
def test_a_request_that_the_engine_does_not_have_counts_as_dropped_at_once(tiny: TinyModel, closed: bool) -> None:
    engine, ended, dropped = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS), Collector(), list[str]()
    engine.submit(DecodeRequest("ended", prompt(5), Sampling(max_tokens=2, ignore_eos=True)), ended)
    ended.result()
    if closed:
        engine.close()
    for name in ("ended", "unknown"):
        engine.cancel(name, lambda: dropped.append("dropped"))
    engine.close()
    assert dropped == ["dropped", "dropped"]


def test_a_request_that_is_cancelled_as_the_engine_closes_counts_as_dropped(tiny: TinyModel) -> None:
    engine, running, dropped = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS), Collector(), threading.Event()
    engine.submit(DecodeRequest("leaving", prompt(5), Sampling(max_tokens=5000, ignore_eos=True)), running)
    assert running.first.wait(60)
    with held_up(engine):
        engine.cancel("leaving", dropped.set)
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: not engine.alive)
    closing.join(60)
    assert dropped.is_set()


def test_cancelling_one_request_does_not_change_its_neighbours(engine: MLXDecodeEngine) -> None:
    expected = start(engine, prompt(30), max_tokens=30).result()
    doomed = Collector()
    engine.submit(DecodeRequest("doomed", prompt(90), Sampling(max_tokens=300, ignore_eos=True)), doomed)
    survivor = start(engine, prompt(30), max_tokens=30)
    assert survivor.first.wait(60)
    engine.cancel("doomed")

    assert survivor.result() == expected


def test_a_listener_may_cancel_its_own_request(engine: MLXDecodeEngine) -> None:
    class Quitter(Collector):
        def on_tokens(self, tokens: Any, timing: Any) -> None:
            super().on_tokens(tokens, timing)
            engine.cancel("quitter")

    quitter = Quitter()
    engine.submit(DecodeRequest("quitter", prompt(5), Sampling(max_tokens=50, ignore_eos=True)), quitter)
    wait_until(lambda: idle(engine))

    assert len(quitter.tokens) == 1


def test_a_listener_that_fails_loses_its_own_request_only(
    engine: MLXDecodeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Collector):
        def on_tokens(self, tokens: Any, timing: Any) -> None:
            raise OSError("broken pipe")

    neighbour = start(engine, prompt(20), max_tokens=20)
    engine.submit(DecodeRequest("broken", prompt(5), Sampling(max_tokens=50, ignore_eos=True)), Broken())

    assert len(neighbour.result()) == 20
    wait_until(lambda: "the listener of request broken failed" in caplog.text)


def test_a_failing_step_fails_the_batch_with_a_clear_error_and_the_engine_goes_on(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine._backend.loaded.model
    original, failing = type(model).__call__, threading.Event()

    def call(self: object, x: Any, **kw: Any) -> Any:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("out of memory")
        return original(self, x, **kw)

    monkeypatch.setattr(type(model), "__call__", call)
    expected = start(engine, prompt(20), max_tokens=10).result()
    lost = [start(engine, prompt(20 + i), max_tokens=500) for i in range(2)]
    for collector in lost:
        assert collector.first.wait(60)
    failing.set()

    for collector in lost:
        with pytest.raises(ModelError, match="a decode step failed: RuntimeError: out of memory"):
            collector.result()
    assert start(engine, prompt(20), max_tokens=10).result() == expected


def test_requests_that_cannot_be_run_are_refused_at_once(engine: MLXDecodeEngine) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        start(engine, [])
    with pytest.raises(RequestError, match="temperature: "):
        start(engine, [9], temperature=-1)
    running = Collector()
    engine.submit(DecodeRequest("twice", prompt(5), Sampling(max_tokens=400, ignore_eos=True)), running)
    with pytest.raises(RequestError, match="twice is already running"):
        engine.submit(DecodeRequest("twice", prompt(5), Sampling()), Collector())
    engine.bounds = DecodeBounds(max_requests=1)
    with pytest.raises(Overloaded):
        start(engine, prompt(5))
    engine.cancel("twice")
    engine.cancel("never heard of")


def test_logits_are_asked_for_within_the_prompt(engine: MLXDecodeEngine) -> None:
    with pytest.raises(RequestError, match="the last 4 of 3 tokens"):
        engine.logits([9, 10, 11], 4)
    assert np.array(engine.logits([9, 10, 11], 3)).shape == (3, VOCAB)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss_yarn"])
def test_warm_up_runs_both_ways_and_leaves_nothing(architecture: str, mlx_engine: Engines) -> None:
    mlx_engine(architecture).warm_up()

    assert idle(mlx_engine(architecture))


def test_closing_ends_what_runs_with_cancelled_and_refuses_what_comes(tiny: TinyModel) -> None:
    engine = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS)
    running = [start(engine, prompt(20), max_tokens=5000) for _ in range(6)]
    assert running[0].first.wait(60)
    engine.close()
    engine.close()

    for collector in running:
        with pytest.raises(Cancelled, match="closed"):
            collector.result()
    assert idle(engine) and not engine.alive
    with pytest.raises(Cancelled):
        start(engine, prompt(5))
    with pytest.raises(Cancelled):
        engine.logits([9], 1)


@pytest.fixture
def mortal(tiny: TinyModel) -> Iterator[MLXDecodeEngine]:
    """An engine to break."""
    engine = MLXDecodeEngine(tiny("llama"), 8192, OPTIONS)
    yield engine
    engine.close()


def break_down(*_: Any, **__: Any) -> None:
    raise SystemExit("the end")


def test_a_thread_that_dies_fails_all_requests_and_commands_then_and_later(
    mortal: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(mortal, prompt(20), max_tokens=5000)
    assert running.first.wait(60) and mortal.alive
    with held_up(mortal):  # commands that lie behind the one that ends the thread
        monkeypatch.setattr(mortal._batch, "build", break_down)
        waiting = [start(mortal, prompt(20)) for _ in range(2)]
        asking = ThreadPoolExecutor(1).submit(mortal.logits, [9], 1)
        wait_until(lambda: len(mortal._commands) == 3)

    for collector in (running, *waiting):
        with pytest.raises(ModelError, match="the decode engine's thread ended: SystemExit: the end"):
            collector.result()
    with pytest.raises(ModelError, match="thread ended"):
        asking.result(30)
    assert not mortal.alive and idle(mortal) and "the decode engine's thread ended" in caplog.text
    with pytest.raises(ModelError, match="thread ended"):
        start(mortal, prompt(20))
    with pytest.raises(ModelError, match="thread ended"):
        mortal.logits([9], 1)


def test_a_failing_command_fails_by_itself(engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    build = engine._batch.build

    def fail(job: Any) -> Any:
        if job.request.id == "unlucky":
            raise RuntimeError("no memory")
        return build(job)

    expected = start(engine, prompt(30), max_tokens=40).result()
    monkeypatch.setattr(engine._batch, "build", fail)
    unlucky = Collector()
    with held_up(engine):
        engine.submit(DecodeRequest("unlucky", prompt(5), Sampling(max_tokens=5)), unlucky)
        asking = ThreadPoolExecutor(1).submit(engine.logits, [9], 1)
        neighbour = start(engine, prompt(30), max_tokens=40)
    with pytest.raises(ModelError, match="RuntimeError: no memory"):
        unlucky.result()
    assert len(asking.result(30)) == 1
    assert neighbour.result() == expected and engine.alive


def raise_bad_cache(*_: Any, **options: Any) -> None:
    raise RuntimeError("bad cache")


def test_a_batch_from_which_nothing_can_be_removed_fails_its_requests_and_the_engine_goes_on(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectors = {name: Collector() for name in ("leaving", "staying")}
    for name, collector in collectors.items():
        engine.submit(DecodeRequest(name, prompt(20), Sampling(max_tokens=5000, ignore_eos=True)), collector)
        assert collector.first.wait(60)
    monkeypatch.setattr(BatchGenerator, "remove", raise_bad_cache)
    engine.cancel("leaving")

    with pytest.raises(ModelError, match="RuntimeError: bad cache"):
        collectors["staying"].result()
    assert collectors["leaving"].error is None
    assert len(start(engine, prompt(20), max_tokens=3).result()) == 3 and engine.alive


def test_a_batch_that_cannot_be_measured_fails_its_requests_finished_ones_too(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.bounds = DecodeBounds(count_steps=1 << 30)  # measured when the short answer ends, not before

    class Breaking(Collector):
        def on_tokens(self, tokens: Any, timing: Any) -> None:
            super().on_tokens(tokens, timing)
            monkeypatch.setattr(BatchGenerator, "prompt_cache_nbytes", property(raise_bad_cache))

    running, finishing = start(engine, prompt(20), max_tokens=5000), Breaking()
    assert running.first.wait(60)
    engine.submit(DecodeRequest("finishing", prompt(20), Sampling(max_tokens=4, ignore_eos=True)), finishing)
    for collector in (finishing, running):
        with pytest.raises(ModelError, match="RuntimeError: bad cache"):
            collector.result()
    monkeypatch.undo()
    assert len(start(engine, prompt(20), max_tokens=3).result()) == 3 and engine.alive


def test_prompts_side_by_side_share_one_chunk_per_step(
    engine: MLXDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine._backend.loaded.model
    fed: list[int] = []
    original = type(model).__call__
    monkeypatch.setattr(mlx_chunk, "LEAST_TOKENS", 4)
    monkeypatch.setattr(type(model), "__call__", counting(original, fed))
    prompts = [prompt(100 + i, seed=i) for i in range(4)]
    with held_up(engine):
        collectors = [start(engine, tokens, max_tokens=1) for tokens in prompts]
    for collector in collectors:
        collector.result()

    assert max(fed) == OPTIONS.chunk_tokens
    fed.clear()
    start(engine, prompts[0], max_tokens=1).result()
    assert max(fed) == OPTIONS.chunk_tokens
    assert [collector.timing.computed_prompt_tokens for collector in collectors] == [100, 101, 102, 103]


def test_mlx_keeps_no_more_freed_buffers_than_it_may(tiny: TinyModel) -> None:
    usual = mx.set_cache_limit(64 << 30)  # as on a Mac
    MLXDecodeEngine(tiny("llama"), 8192, OPTIONS).close()
    assert mx.set_cache_limit(usual) == MAX_CACHE_BYTES


class Hasty(MLXDecodeEngine):
    bounds = DecodeBounds(trim_after_s=0.01)


def test_memory_is_trimmed_when_no_request_is_left_and_again_after_the_next_one(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = threading.Semaphore(0)
    monkeypatch.setattr(mlx_memory, "trim_memory", idle.release)
    engine = Hasty(tiny("llama"), 8192, OPTIONS)
    try:
        assert idle.acquire(timeout=60)
        start(engine, prompt(16), max_tokens=3).result()
        assert idle.acquire(timeout=60)
    finally:
        engine.close()


def test_info_describes_the_loaded_engine(mlx_engine: Engines) -> None:
    info = mlx_engine("qwen3_moe").info

    assert info.backend == "mlx/cpu"
    assert set(info.versions) == {"mlx", "mlx-lm", "transformers"}
    assert info.memory_bytes > 1_000_000
    assert (info.profile.source, info.profile.architecture, info.profile.vocab_size) == ("mlx-lm", "qwen3_moe", VOCAB)
    assert info.eos_ids == mlx_engine("qwen3_moe").tokenizer.eos_ids
