"""The simulated decode engine: tokens in batches, KV counted while it is held, nothing after a cancel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from disagg.api.layout import Layout
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, DecodeTiming, Token
from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.errors import Cancelled, LayoutMismatch, ModelError, RequestError
from disagg.kv.received import ReceivedKV
from disagg.planning.times import ingest, step
from tests.deadlines import wait_until
from tests.simulated import write_config

PATIENCE_S = 60.0
Make = Callable[..., SimulatedDecodeEngine]


class Listener:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.outcome: queue.Queue[DecodeTiming | Exception] = queue.Queue()
        self.began = threading.Event()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.tokens += [token.id for token in tokens]
        self.began.set()
        if tokens[-1].finish:
            self.outcome.put(timing)

    def on_error(self, error: Exception) -> None:
        self.outcome.put(error)

    def wait(self) -> DecodeTiming:
        outcome = self.outcome.get(timeout=PATIENCE_S)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SimulatedDecodeEngine] = []

    def build(hardware: str = "h200-sxm", **options: int) -> SimulatedDecodeEngine:
        engine_options = EngineOptions("simulated", **options)  # type: ignore[arg-type]  # of any name
        made.append(SimulatedDecodeEngine(write_config(tmp_path), 16384, engine_options, hardware))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def kv(layout: Layout, tokens: int) -> ReceivedKV:
    return ReceivedKV(layout, tokens, None)


def test_a_handed_over_request_computes_one_prompt_token(make: Make) -> None:
    engine, listener = make(), Listener()
    engine.submit(DecodeRequest("a", [1] * 100, Sampling(max_tokens=5), kv(engine.info.layout, 99)), listener)
    timing = listener.wait()
    assert len(listener.tokens) == 5
    assert timing.computed_prompt_tokens == 1
    assert timing.submitted <= timing.ingested <= timing.first_token


def test_alone_it_computes_the_whole_prompt(make: Make) -> None:
    engine, listener = make(chunk_tokens=32), Listener()
    engine.submit(DecodeRequest("a", [1] * 100, Sampling(max_tokens=1)), listener)
    assert listener.wait().computed_prompt_tokens == 100
    assert len(listener.tokens) == 1


def test_it_takes_no_less_than_predicted(make: Make) -> None:
    engine, listener = make("m4-max"), Listener()
    received = kv(engine.info.layout, 999)
    engine.submit(DecodeRequest("a", [1] * 1000, Sampling(max_tokens=4), received), listener)
    timing = listener.wait()
    finished = time.monotonic()
    model = engine._model
    steps = sum(step(model.device, model.shape, 1000 + index, "bfloat16") for index in range(4))
    assert finished - timing.submitted >= ingest(received.nbytes) + steps


def test_it_gives_the_answer_that_the_prefill_engine_gives(make: Make, tmp_path: Path) -> None:
    engine, listener = make(), Listener()
    prompt, sampling = [7, 8, 9], Sampling(max_tokens=12)
    engine.submit(DecodeRequest("a", prompt, sampling, kv(engine.info.layout, 2)), listener)
    listener.wait()
    prefill = SimulatedPrefillEngine(tmp_path / "config.json", 16384, EngineOptions("simulated"), "dgx-spark")
    assert listener.tokens == [token.id for token in prefill.generate(prompt, sampling)]
    assert prefill.info.fingerprint == engine.info.fingerprint
    assert prefill.info.layout == engine.info.layout


def test_after_step_is_called_once_after_all_listeners(make: Make) -> None:
    engine, called = make(), threading.Event()
    listeners, seen = [Listener() for _ in range(3)], []

    def after_step() -> None:
        seen.append([len(listener.tokens) for listener in listeners])
        if seen[-1] == [4] * 3:
            called.set()

    engine.after_step(after_step)
    for index, listener in enumerate(listeners):
        engine.submit(DecodeRequest(str(index), [index] * 10, Sampling(max_tokens=4)), listener)
    assert called.wait(60)
    assert len(seen) <= 4 + 2, "fewer than one per token"


def test_many_requests_share_the_batch_and_all_end(make: Make) -> None:
    engine = make(max_batch=3)
    listeners = [Listener() for _ in range(8)]
    for index, listener in enumerate(listeners):
        request = DecodeRequest(str(index), [index] * 10, Sampling(max_tokens=3 + index))
        engine.submit(request, listener)
    for index, listener in enumerate(listeners):
        listener.wait()
        assert len(listener.tokens) == 3 + index
    assert (engine.running, engine.kv_bytes) == (0, 0)


def test_the_batch_has_its_size_and_the_next_request_waits_for_a_place(make: Make) -> None:
    engine = make("m4-max", max_batch=2)
    first, second, third = listeners = [Listener() for _ in range(3)]
    for name, listener in zip("abc", listeners, strict=True):
        engine.submit(DecodeRequest(name, [1], Sampling(max_tokens=10_000)), listener)
    assert first.began.wait(PATIENCE_S)
    assert second.began.wait(PATIENCE_S)
    seen = len(first.tokens)
    wait_until(lambda: len(first.tokens) >= seen + 3, PATIENCE_S, "three more steps")
    assert not third.began.is_set()
    engine.cancel("a")
    assert third.began.wait(PATIENCE_S)


def test_kv_is_counted_while_a_request_runs_and_dropped_when_it_is_cancelled(make: Make) -> None:
    engine, listener = make("m4-max"), Listener()
    received = kv(engine.info.layout, 99)
    engine.submit(DecodeRequest("a", [1] * 100, Sampling(max_tokens=10_000), received), listener)
    assert listener.began.wait(PATIENCE_S)
    assert engine.kv_bytes >= engine.info.layout.nbytes(100)
    assert engine.running == 1
    engine.cancel("a")
    assert (engine.running, engine.kv_bytes) == (0, 0)
    seen = len(listener.tokens)
    other = Listener()
    engine.submit(DecodeRequest("b", [1], Sampling(max_tokens=3)), other)
    other.wait()
    assert len(listener.tokens) == seen
    engine.cancel("unknown")


def test_closing_cancels_what_runs(make: Make) -> None:
    engine, listener = make("m4-max"), Listener()
    engine.submit(DecodeRequest("a", [1], Sampling(max_tokens=10_000)), listener)
    assert listener.began.wait(PATIENCE_S)
    engine.close()
    with pytest.raises(Cancelled):
        listener.wait()
    wait_until(lambda: engine.running == 0, PATIENCE_S, "the engine to be empty")
    with pytest.raises(Cancelled, match="closed"):
        engine.submit(DecodeRequest("b", [1], Sampling()), Listener())


def test_if_its_thread_fails_every_request_gets_an_error(make: Make) -> None:
    def fail() -> None:
        raise SystemExit("a defect")

    engine, listener = make("m4-max"), Listener()
    engine.after_step(fail)
    engine.submit(DecodeRequest("a", [1], Sampling(max_tokens=10_000)), listener)
    with pytest.raises(ModelError, match="a defect"):
        listener.wait()
    wait_until(lambda: not engine.alive, PATIENCE_S, "the thread to end")
    with pytest.raises(ModelError, match="thread ended"):
        engine.submit(DecodeRequest("b", [1], Sampling()), Listener())


def test_kv_of_another_model_or_prompt_is_refused(make: Make) -> None:
    engine = make()
    other = Layout(engine.info.layout.layers[:-1], "bfloat16")
    with pytest.raises(LayoutMismatch):
        engine.submit(DecodeRequest("a", [1] * 10, Sampling(), kv(other, 9)), Listener())
    with pytest.raises(LayoutMismatch, match=r"covers tokens \[0, 5\), but \[0, 9\)"):
        engine.submit(DecodeRequest("a", [1] * 10, Sampling(), kv(engine.info.layout, 5)), Listener())


def test_the_kv_of_a_finished_request_is_held_for_the_next_turn(make: Make) -> None:
    engine, first, second, third = make(chunk_tokens=32), Listener(), Listener(), Listener()
    prompt = list(range(100))
    engine.submit(DecodeRequest("a", prompt, Sampling(max_tokens=5), salt="s"), first)
    first.wait()
    longer = [*prompt, *first.tokens, *range(40)]
    held = engine.find_held(longer, "s")
    assert held is not None and held.tokens == 105
    assert engine.held_bytes >= engine.info.layout.nbytes(105)
    assert engine.find_held(longer, "") is None

    engine.submit(DecodeRequest("b", longer, Sampling(max_tokens=1), held=held), second)
    assert second.wait().computed_prompt_tokens == 40
    received = ReceivedKV(engine.info.layout, 144, None, 105)
    engine.submit(DecodeRequest("c", longer, Sampling(max_tokens=1), received, held), third)
    assert third.wait().computed_prompt_tokens == 1
    held.release()

    engine.give_up_held(engine.held_bytes)
    assert (engine.held_bytes, engine.find_held(longer, "s")) == (0, None)


def test_a_request_that_is_cancelled_in_its_answer_leaves_its_kv(make: Make) -> None:
    engine, listener = make("m4-max"), Listener()
    engine.submit(DecodeRequest("a", list(range(100)), Sampling(max_tokens=10_000)), listener)
    assert listener.began.wait(PATIENCE_S)
    dropped = threading.Event()
    engine.cancel("a", dropped.set)
    assert dropped.wait(PATIENCE_S)
    held = engine.find_held([*range(100), *listener.tokens, 1], "")
    assert held is not None and held.tokens >= 99


def test_what_is_held_shortens_the_prompt_by_its_predicted_time(make: Make) -> None:
    engine = make("m4-max", chunk_tokens=512)
    seconds, prefill = engine._model.prefill(4000).seconds, engine._model.prefill(3000).seconds
    assert sum(engine._batch.chunks(0, 4000)) == pytest.approx(seconds)
    assert sum(engine._batch.chunks(3000, 4000)) == pytest.approx(seconds - prefill)
    assert sum(engine._batch.chunks(4000, 4000)) == 0


def test_an_answer_goes_on_after_the_tokens_that_another_host_gave(make: Make) -> None:
    engine, whole, rest = make(), Listener(), Listener()
    engine.submit(DecodeRequest("a", [7, 8, 9], Sampling(max_tokens=12)), whole)
    whole.wait()
    engine.submit(DecodeRequest("b", [7, 8, 9, *whole.tokens[:5]], Sampling(max_tokens=12), answered=5), rest)
    rest.wait()
    assert rest.tokens == whole.tokens[5:]


def test_it_beats_after_every_chunk_and_step(make: Make) -> None:
    engine, listener = make(chunk_tokens=32), Listener()
    beats: list[None] = []
    engine.on_beat = lambda: beats.append(None)
    engine.submit(DecodeRequest("a", [1] * 97, Sampling(max_tokens=4)), listener)
    listener.wait()
    wait_until(lambda: len(beats) >= 3 + 3, PATIENCE_S, "a beat per chunk and step")


def test_one_id_runs_once(make: Make) -> None:
    engine = make("m4-max")
    engine.submit(DecodeRequest("a", [1], Sampling(max_tokens=10_000)), Listener())
    with pytest.raises(RequestError, match="already running"):
        engine.submit(DecodeRequest("a", [1], Sampling()), Listener())


def test_it_has_no_logits(make: Make) -> None:
    with pytest.raises(ModelError, match="no model runs"):
        make().logits([1, 2], 1)
