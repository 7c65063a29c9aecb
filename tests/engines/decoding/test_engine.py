"""disagg/engines/decoding: what the thread does with any batch. The batch here counts to three for each request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy
import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.api.sampling import Sampling
from disagg.engines.base import ChunkScores, DecodeRequest, DecodeTiming, EngineInfo, Token
from disagg.engines.decoding import Caches, DecodeBounds, DecodeEngine, Job
from disagg.engines.model.prefix_cache import PrefixCache
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import Cancelled, ModelError, Overloaded

LAYOUT = Layout((LayerLayout("full", 1, 1, 1),), "float32")
THREE = Sampling(max_tokens=3)


class Collector:
    """A listener that records the tokens and the error of its request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.ended = threading.Event()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.tokens += [token.id for token in tokens]
        if tokens[-1].finish:
            self.ended.set()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def result(self) -> list[int]:
        """The token ids, once the request has ended well."""
        assert self.ended.wait(60)
        if self.error is not None:
            raise self.error
        return self.tokens


class Counting:
    """A Batch."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.before_step: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def nbytes(self) -> int:
        return len(self.jobs)

    @property
    def due(self) -> bool:
        return bool(self.jobs)

    def receive(self, job: Job) -> None:
        self.jobs.append(job)

    def compute_tail(self) -> None:
        return None

    def build(self, job: Job) -> Caches:
        return None

    def insert(self, job: Job, caches: Caches) -> None:
        self.jobs.append(job)

    def remove(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def step(self) -> list[tuple[Job, Token]]:
        self.before_step()
        for job in self.jobs:
            job.written += 1
        return [(job, Token(job.written, 0.0, finish="length" if job.written == 3 else None)) for job in self.jobs]

    def drop_finished(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.remove(job)

    def close(self) -> None:
        self.jobs.clear()


class Counted:
    """Scoring of so many tokens, one at a step; notes on which threads it is called."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.threads: list[str] = []
        self.closed = False

    def step(self) -> ChunkScores:
        self.threads.append(threading.current_thread().name)
        self.remaining -= 1
        floats, integers = numpy.zeros((1, 0), numpy.float32), numpy.zeros((1, 0), numpy.int32)
        return ChunkScores(floats, integers, integers, floats)

    def close(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.closed = True


class Backend:
    """A Backend whose framework has nothing to release."""

    def __init__(self) -> None:
        self.info = cast(EngineInfo, type("Info", (), {"layout": LAYOUT}))
        self.tokenizer = cast(PromptTokenizer, None)
        self.held: PrefixCache[Any, Any] = PrefixCache(0, None)
        self.batches: list[Counting] = []
        self.scored = Counted(0)

    def new_batch(self) -> Counting:
        self.batches.append(Counting())
        return self.batches[-1]

    def scoring(self, tokens: Sequence[int], top: int) -> Any:
        self.scored = Counted(len(tokens) - 1)
        return self.scored

    def hold(self, job: Job, tokens: list[int], caches: Any) -> None:
        raise AssertionError("nothing was held")

    def release_memory(self) -> None:
        pass

    def trim_memory(self) -> None:
        pass


class Toy(DecodeEngine):
    def __init__(self) -> None:
        self.backend = Backend()
        self.thread: list[str] = []
        super().__init__(self.opened, name="toy-decode")

    @contextmanager
    def opened(self) -> Iterator[Backend]:
        self.thread.append(f"opened on {threading.current_thread().name}")
        yield self.backend
        self.thread.append("closed")

    def warm_up(self) -> None:
        pass

    def allocate(self, nbytes: int) -> Any:
        return bytearray(nbytes)

    def logits(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


@pytest.fixture
def toy() -> Iterator[Toy]:
    engine = Toy()
    yield engine
    engine.close()


def submit(engine: Toy, id: str) -> Collector:
    collector = Collector()
    engine.submit(DecodeRequest(id, [7, 8], THREE), collector)
    return collector


def test_all_of_a_framework_runs_on_one_thread_and_is_left_on_it(toy: Toy) -> None:
    toy.close()
    assert toy.thread == ["opened on toy-decode", "closed"] and not toy.alive


def test_requests_get_their_tokens_and_leave_nothing(toy: Toy) -> None:
    collectors = [submit(toy, name) for name in "abc"]
    assert [one.result() for one in collectors] == [[1, 2, 3]] * 3
    assert toy.call(lambda backend: (toy.running, toy.kv_bytes, len(backend.batches))) == (0, 0, 1)


def test_a_step_that_fails_fails_its_requests_and_the_next_ones_run_in_a_new_batch(toy: Toy) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    toy.call(lambda backend: setattr(backend.batches[0], "before_step", fail))
    with pytest.raises(ModelError, match="a defect"):
        submit(toy, "a").result()
    assert submit(toy, "b").result() == [1, 2, 3] and len(toy.backend.batches) == 2


def test_a_request_that_is_cancelled_hears_nothing_more(toy: Toy) -> None:
    dropped = threading.Event()
    toy.call(lambda backend: setattr(backend.batches[0], "before_step", lambda: toy.cancel("a", dropped.set)))
    collector = submit(toy, "a")
    assert dropped.wait(60)
    assert (collector.tokens, collector.error, toy.running) == ([], None, 0)


def test_no_more_requests_than_the_bound_are_taken(toy: Toy) -> None:
    toy.bounds = DecodeBounds(max_requests=0)
    with pytest.raises(Overloaded):
        submit(toy, "a")


def test_what_cannot_be_opened_is_raised_by_the_constructor() -> None:
    class Broken(Toy):
        @contextmanager
        def opened(self) -> Iterator[Backend]:
            raise ModelError("no weights")
            yield self.backend

    with pytest.raises(ModelError, match="no weights"):
        Broken()


def test_a_closed_engine_refuses_requests(toy: Toy) -> None:
    toy.close()
    with pytest.raises(Cancelled, match="closed"):
        submit(toy, "a")


def test_a_prompt_is_scored_on_the_thread_chunk_by_chunk_while_answers_go_on(toy: Toy) -> None:
    chunks: list[ChunkScores] = []
    answers: list[Collector] = []

    def emit(scores: ChunkScores) -> None:
        chunks.append(scores)
        answers.append(submit(toy, f"a{len(chunks)}"))
        assert answers[-1].result() == [1, 2, 3]

    toy.score([7, 8, 9], 0, emit, lambda: False)
    scored = toy.backend.scored
    assert (len(chunks), scored.closed, set(scored.threads)) == (2, True, {"toy-decode"})


def test_a_scoring_that_is_cancelled_ends_after_its_chunk(toy: Toy) -> None:
    chunks: list[ChunkScores] = []
    toy.score([7, 8, 9], 0, chunks.append, lambda: bool(chunks))
    assert (len(chunks), toy.backend.scored.closed) == (1, True)
