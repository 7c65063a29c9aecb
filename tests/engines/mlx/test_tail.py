"""A split on mlx-lm: the first layers of a prompt arrive chunk by chunk, the others are computed meanwhile; the answer
is that of mlx-lm alone, token for token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest
from disagg.engines.base.audit import BOUNDS
from disagg.engines.decoding.tail import TailPolicy
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.prefill import MLXPrefillEngine
from disagg.errors import Cancelled, LayoutMismatch, PeerLost
from tests.deadlines import wait_until
from tests.engines.heads import Head
from tests.engines.mlx.mlx_parts import Collector, prompt, start
from tests.tiny_models import TinyModel

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48, max_batch=4)
ANSWER = 32


class Pair:
    """Two engines on one model."""

    def __init__(self, model: str, tiny: TinyModel) -> None:
        self.head = MLXPrefillEngine(tiny(model), 2048, OPTIONS)
        self.tail = MLXDecodeEngine(tiny(model), 2048, OPTIONS)
        self.layers = self.tail.info.split.layers
        self._count = 0

    def alone(self, tokens: list[int]) -> list[int]:
        return start(self.tail, tokens, max_tokens=ANSWER).result()

    def submit(self, head: Head, tokens: list[int], salt: str = "") -> Collector:
        self._count += 1
        collector, held = Collector(), self.tail.find_held(tokens, salt) if salt else None
        request = DecodeRequest(
            f"split-{self._count}",
            tokens,
            Sampling(max_tokens=ANSWER, ignore_eos=True),
            held=held,
            salt=salt,
            audit=BOUNDS["float32"],
            arriving=head.arriving,
        )
        self.tail.submit(request, collector)
        return collector

    def close(self) -> None:
        self.tail.close()
        self.head.close()


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def pair(request: pytest.FixtureRequest, tiny: TinyModel) -> Iterator[Pair]:
    pair = Pair(request.param, tiny)
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def left_idle(pair: Pair) -> Iterator[None]:
    yield
    wait_until(lambda: (pair.tail.running, pair.tail.kv_bytes) == (0, 0))


def test_every_split_of_two_prompts_at_once_is_answered_as_by_one_engine_alone(pair: Pair) -> None:
    prompts = [prompt(65, seed=1), prompt(194, seed=2)]  # of 194, the last chunk has one token
    alone = [pair.alone(tokens) for tokens in prompts]
    for layers in range(1, pair.layers + 1):
        heads = [Head(pair.head, pair.tail, tokens, layers) for tokens in prompts]
        answers = [pair.submit(head, tokens) for head, tokens in zip(heads, prompts, strict=True)]
        while any(not head.done for head in heads):
            for head in heads:
                if not head.done:
                    head.step()
        for head in heads:
            head.finish()
        assert [answer.result() for answer in answers] == alone, layers
        for answer in answers:
            assert answer.timing.audit is not None, "the KV of all layers is audited"
            assert answer.timing.resumed_at is None
            assert (answer.timing.tail_compute_s > 0) == (layers < pair.layers)
            assert answer.timing.computed_prompt_tokens == 1


def test_a_head_that_fails_in_mid_prompt_is_gone_on_from_after_its_last_whole_chunk(pair: Pair) -> None:
    tokens = prompt(300, seed=3)
    alone = pair.alone(tokens)
    for layers in (1, pair.layers - 1, pair.layers):
        for chunks in (0, 1, 3, 5):
            head = Head(pair.head, pair.tail, tokens, layers)
            answer = pair.submit(head, tokens)
            for _ in range(chunks):
                head.step()
            head.fail(PeerLost("the head was killed"))
            assert answer.result() == alone, (layers, chunks)
            assert answer.timing.resumed_at == 48 * chunks
            assert answer.timing.computed_prompt_tokens == len(tokens) - 48 * chunks


def test_while_an_answer_is_written_a_tail_waits_for_its_time(pair: Pair) -> None:
    pace = pair.tail._batch._tails._pace
    usual, pace.policy = pace.policy, TailPolicy(share=1e-9)
    try:
        tokens = prompt(300, seed=8)
        head = Head(pair.head, pair.tail, tokens, 1, chunk_tokens=150)
        answered = start(pair.tail, prompt(20, seed=9), max_tokens=100)
        assert answered.first.wait(60)
        divided = pair.submit(head, tokens)
        head.finish()
        assert len(answered.result()) == 100
        assert divided.result() == pair.alone(tokens)
        assert divided.timing.ingested > answered.finished, "all but the first piece came after the answer"
    finally:
        pace.policy = usual


def test_a_request_that_is_cancelled_while_its_head_computes_leaves_nothing(pair: Pair) -> None:
    tokens = prompt(200, seed=4)
    head = Head(pair.head, pair.tail, tokens, 1)
    pair.submit(head, tokens)
    head.step()
    wait_until(lambda: head.arriving.progress.allowed > 4, what="the first chunk is done with")
    assert pair.tail.kv_bytes > 0
    (request,) = pair.tail._jobs
    pair.tail.cancel(request)
    wait_until(lambda: (pair.tail.running, pair.tail.kv_bytes) == (0, 0))
    head.fail(Cancelled("the request was cancelled"))
    head.arriving.release()


def test_a_split_begins_after_the_prefix_that_the_tail_holds_of_another_one(pair: Pair) -> None:
    first = prompt(120, seed=5)
    head = Head(pair.head, pair.tail, first, 1)
    answered = pair.submit(head, first, salt="s")
    head.finish()
    second = [*first, *answered.result(), *prompt(150, seed=6)]
    alone = pair.alone(second)
    for layers in range(1, pair.layers + 1):
        held = pair.tail.find_held(second, "s")
        assert held is not None and held.tokens >= 120
        start_at = held.tokens
        held.release()
        head = Head(pair.head, pair.tail, second, layers, start=start_at)
        answer = pair.submit(head, second, salt="s")
        assert head.finish().whole == len(second) - 1
        assert answer.result() == alone, layers


def test_what_is_not_a_head_of_this_model_is_refused(pair: Pair) -> None:
    tokens = prompt(65, seed=7)
    head = Head(pair.head, pair.tail, tokens, 1)
    with pytest.raises(LayoutMismatch, match="covers tokens"):
        pair.submit(head, [*tokens, 9])
    head.arriving.hidden += 1
    with pytest.raises(LayoutMismatch, match="hidden states have 65 elements, but 64 are needed"):
        pair.submit(head, tokens)
    head.arriving.layers = pair.layers + 1
    with pytest.raises(LayoutMismatch, match="number of layers"):
        pair.submit(head, tokens)
    head.fail(Cancelled("refused"))
