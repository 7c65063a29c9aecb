"""KV of finished requests: a request that begins with held tokens gets exactly the answer of one that does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from disagg.api.layout import LayerLayout, Layout
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, DecodeTiming, HeldKV, Token
from disagg.engines.mlx import prefix_cache as mlx_prefix_cache
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.errors import DisaggError, LayoutMismatch, ModelError, RequestError
from disagg.kv.received import ReceivedKV
from tests.deadlines import wait_until
from tests.engines.mlx.mlx_parts import Collector, Reference, References, prompt, start
from tests.tiny_models import WINDOW, TinyModel
from tests.values import present

MODELS = ["llama", "gpt_oss", "gemma3_text"]  # full, sliding and full, mostly sliding
CHUNK = 48
ANSWER = 16
"""Tokens of an answer, unless a test needs more."""


@dataclass
class Chat:
    """An engine and transformers on one model. send: submits a request that uses what is held for it."""

    engine: MLXDecodeEngine
    reference: Reference
    requests: int = 0

    @property
    def cuts(self) -> bool:
        """Whether every layer keeps every row, so that held KV can be cut anywhere."""
        return all(layer.window is None for layer in self.engine.info.layout.layers)

    def send(
        self,
        tokens: Sequence[int],
        count: int = ANSWER,
        *,
        salt: str = "",
        ship: bool = False,
        answered: int = 0,
        **sampling: Any,
    ) -> tuple[Collector, int]:
        """ship: the KV of the rest is received; else the engine computes it. Returns the number of held tokens too."""
        held = self.engine.find_held(tokens, salt)
        start = held.tokens if held else 0
        kv = self._kv(tokens, start) if ship else None
        collector = _Releasing(held)
        self.requests += 1
        request = DecodeRequest(
            f"chat-{self.requests}",
            list(tokens),
            Sampling(**{"max_tokens": count, "ignore_eos": True, **sampling}),
            kv=kv,
            held=held,
            answered=answered,
            salt=salt,
        )
        try:
            self.engine.submit(request, collector)
        except DisaggError:
            collector.release()
            raise
        return collector, start

    def _kv(self, tokens: Sequence[int], start: int) -> ReceivedKV:
        return self.reference.kv(tokens[:-1], self.engine.info.layout, start)


class _Releasing(Collector):
    """Releases the held KV at the first token, as the server does."""

    def __init__(self, held: HeldKV | None) -> None:
        super().__init__()
        self.held = held

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.release()
        super().on_tokens(tokens, timing)

    def on_error(self, error: Exception) -> None:
        self.release()
        super().on_error(error)

    def release(self) -> None:
        if self.held is not None:
            self.held.release()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny: TinyModel, reference: References) -> Iterator[Chat]:
    options = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=CHUNK)
    engine = MLXDecodeEngine(tiny(request.param), 8192, options)
    yield Chat(engine, reference(request.param))
    engine.close()


@pytest.fixture
def chat(model: Chat) -> Chat:
    model.engine.give_up_held(model.engine.held_bytes)
    return model


@pytest.mark.parametrize("ship", [False, True], ids=["computed here", "received"])
@pytest.mark.parametrize("new", [1, 2, 40, 3 * WINDOW + 7])
def test_a_second_turn_gives_the_answer_of_a_full_prefill(chat: Chat, new: int, ship: bool) -> None:
    first = prompt(150)
    answer, held = chat.send(first, ship=ship)
    assert (held, answer.result()) == (0, chat.reference.greedy(first, ANSWER, draft=answer.ids))
    second = [*first, *answer.ids, *prompt(new, seed=2)]

    answer, held = chat.send(second, ship=ship)

    assert held == min(len(first) + ANSWER, len(second) - 1)
    assert answer.result() == chat.reference.greedy(second, ANSWER, draft=answer.ids)
    assert answer.timing.computed_prompt_tokens == (1 if ship else len(second) - held)


@pytest.mark.parametrize("ship", [False, True], ids=["computed here", "received"])
def test_the_same_prompt_again_computes_its_last_token_only(chat: Chat, ship: bool) -> None:
    tokens = prompt(2 * WINDOW + 5)
    first, _ = chat.send(tokens, ship=ship)
    first.result()

    again, held = chat.send(tokens, ship=ship)

    assert (held, again.result()) == (len(tokens) - 1, first.ids)
    assert again.timing.computed_prompt_tokens == 1


def test_a_prompt_that_leaves_out_part_of_the_answer_goes_on_from_where_it_differs(chat: Chat) -> None:
    """Chat templates drop the reasoning of earlier turns. Sliding layers go on before the last token of the prompt."""
    first = prompt(150)
    answer, _ = chat.send(first)
    second = [*first, *answer.result()[:9], *prompt(30, seed=2)]

    answer, held = chat.send(second)

    assert held == (159 if chat.cuts else 149)
    assert answer.result() == chat.reference.greedy(second, ANSWER, draft=answer.ids)


@pytest.mark.parametrize("cut", [20, WINDOW - 30])
def test_within_the_first_window_a_sliding_layer_is_cut_at_any_token(chat: Chat, cut: int) -> None:
    first = prompt(WINDOW - 10)
    chat.send(first)[0].result()
    second = [*first[:cut], *prompt(2 * WINDOW, seed=2)]

    answer, held = chat.send(second)

    assert held == cut
    assert answer.result() == chat.reference.greedy(second, ANSWER, draft=answer.ids)


def test_requests_with_and_without_held_kv_share_a_batch(chat: Chat) -> None:
    """Lengths around the window, some computed and some received, joining while others decode or are computed."""
    firsts = [prompt(length, seed=length) for length in (20, WINDOW - 1, 150, 3 * WINDOW)]
    seconds = []
    for tokens in firsts:
        answer, _ = chat.send(tokens)
        seconds.append([*tokens, *answer.result(), *prompt(len(tokens), seed=len(tokens) + 1)])
    seconds.append(prompt(170, seed=9))

    running = []
    for index, tokens in enumerate([*seconds, *seconds]):
        running.append((tokens, *chat.send(tokens, 16, ship=index % 3 == 1)))
        if index % 2:
            assert running[-1][1].first.wait(60)

    for tokens, answer, _ in running:
        assert answer.result() == chat.reference.greedy(tokens, 16, draft=answer.ids)
    assert [held > 0 for _, _, held in running[:5]] == [True, True, True, True, False]


def test_two_requests_go_on_from_the_same_kv_and_do_not_change_it(chat: Chat) -> None:
    first = prompt(150)
    answer, _ = chat.send(first)
    common = [*first, *answer.result()]
    before = chat.engine.held_bytes
    branches = [[*common, *prompt(length, seed=length)] for length in (3, 90)]

    running = [chat.send(tokens) for tokens in branches]

    for tokens, (answer, held) in zip(branches, running, strict=True):
        assert (held, answer.result()) == (len(common), chat.reference.greedy(tokens, ANSWER, draft=answer.ids))
    third = [*common, *prompt(17, seed=17)]
    again, held = chat.send(third)
    assert held == len(common)
    assert again.result() == chat.reference.greedy(third, ANSWER, draft=again.ids)
    assert chat.engine.held_bytes > before


def test_other_salts_do_not_find_it(chat: Chat) -> None:
    tokens = prompt(100)
    chat.send(tokens, salt="alice")[0].result()
    found = []
    for salt in ("bob", "", "alice"):
        answer, held = chat.send(tokens, salt=salt)
        answer.result()
        found.append(held)
    assert found == [0, 0, 99]


def test_a_request_that_is_cancelled_in_its_answer_leaves_its_kv(chat: Chat) -> None:
    tokens = prompt(150)
    answer, _ = chat.send(tokens, 5000)
    wait_until(lambda: len(answer.tokens) >= 10)
    chat.engine.cancel(f"chat-{chat.requests}")
    wait_until(lambda: chat.engine.held_bytes >= chat.engine.info.layout.nbytes(len(tokens)))
    second = [*tokens, *answer.ids, *prompt(20, seed=2)]

    again, held = chat.send(second)

    assert held >= len(tokens) - 1
    assert again.result() == chat.reference.greedy(second, ANSWER, draft=again.ids)


def test_an_answer_goes_on_after_the_tokens_that_another_host_gave(chat: Chat) -> None:
    tokens = prompt(100)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.1}
    whole = chat.send(tokens, 24, **sampling)[0].result()
    chat.engine.give_up_held(chat.engine.held_bytes)

    rest, held = chat.send([*tokens, *whole[:10]], 24, answered=10, **sampling)
    assert (held, rest.result()) == (0, whole[10:])
    rest, held = chat.send([*tokens, *whole[:17]], 24, answered=17, **sampling)
    assert (held, rest.result()) == (116 if chat.cuts else 109, whole[17:])

    with pytest.raises(RequestError, match="it has at most 24"):
        chat.send([*tokens, *whole], 24, answered=24)


def test_bytes_are_those_of_the_layout_and_are_free_once_given_up(chat: Chat) -> None:
    layout = chat.engine.info.layout
    chat.send(prompt(20), 1)[0].result()  # what the first request leaves behind
    chat.engine.give_up_held(chat.engine.held_bytes)
    wait_until(lambda: not chat.engine.kv_bytes)
    chat.engine.call(lambda model: None)
    before = mx.get_active_memory()

    chat.send(prompt(400), 8)[0].result()
    sliding = sum(layout.nbytes(at) - Layout(_full(layout), layout.dtype).nbytes(at) for at in (399, 408))
    assert chat.engine.held_bytes == Layout(_full(layout), layout.dtype).nbytes(408) + sliding
    chat.engine.give_up_held(1)
    chat.engine.give_up_held(10**9)

    chat.engine.call(lambda model: None)  # the arrays are dropped on the engine's thread
    assert chat.engine.held_bytes == 0
    wait_until(lambda: mx.get_active_memory() <= before)


def _full(layout: Layout) -> tuple[LayerLayout, ...]:
    return tuple(layer for layer in layout.layers if layer.window is None)


def test_held_kv_is_not_given_up_while_a_request_is_about_to_use_it(chat: Chat) -> None:
    tokens = prompt(100)
    first, _ = chat.send(tokens)
    first.result()
    held = chat.engine.find_held(tokens, "")
    assert held is not None
    chat.engine.give_up_held(10**9)
    collector = Collector()
    request = DecodeRequest("pinned", tokens, Sampling(max_tokens=ANSWER, ignore_eos=True), held=held)
    chat.engine.submit(request, collector)
    assert collector.result() == first.ids
    held.release()


def test_a_conversation_of_ten_turns_needs_the_kv_of_its_new_tokens_only(chat: Chat) -> None:
    """Bytes to send, and prompt tokens to compute, per turn: of the question, not of the conversation."""
    layout, tokens = chat.engine.info.layout, prompt(200)
    for turn in range(1, 11):
        answer, held = chat.send(tokens, 8, ship=turn % 2 == 0)
        assert answer.result() == chat.reference.greedy(tokens, 8, draft=answer.ids)
        if turn > 1:
            assert len(tokens) - held == 30
            assert layout.nbytes(len(tokens) - 1, held) == layout.nbytes(29)
        tokens = [*tokens, *answer.ids, *prompt(30, seed=turn)]


def test_the_store_stays_within_the_memory_for_kv(tiny: TinyModel) -> None:
    options = EngineOptions("mlx", dtype="float32", device="cpu", max_kv_bytes=300_000)
    engine = MLXDecodeEngine(tiny("llama"), 8192, options)
    per_token = engine.info.layout.nbytes(1)
    for seed in range(5):
        start(engine, prompt(120, seed), max_tokens=2).result()
        assert engine.held_bytes == min(seed + 1, 300_000 // (122 * per_token)) * 122 * per_token
    engine.close()
    assert (engine.held_bytes, engine.find_held(prompt(120, 4), "")) == (0, None)


def test_a_warm_up_leaves_nothing_for_requests_to_find(chat: Chat) -> None:
    chat.engine.warm_up()
    assert (chat.engine.held_bytes, chat.engine.find_held([0] * 40, "")) == (0, None)


def test_a_step_that_fails_leaves_the_held_kv_of_others(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(100)
    first, _ = chat.send(tokens)
    first.result()
    with monkeypatch.context() as broken:
        broken.setattr(BatchGenerator, "_next", _raise)
        with pytest.raises(ModelError, match="no memory"):
            chat.send(tokens)[0].result()
    again, held = chat.send(tokens)
    assert (held, again.result()) == (99, first.ids)


def test_kv_that_cannot_be_copied_is_not_held_and_its_answer_is_whole(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(100)
    monkeypatch.setattr(mlx_prefix_cache, "rows", _raise)
    answer, _ = chat.send(tokens)
    assert answer.result() == chat.reference.greedy(tokens, ANSWER, draft=answer.ids)
    assert (chat.engine.held_bytes, chat.engine.find_held(tokens, "")) == (0, None)


def test_kv_that_gave_a_nan_is_not_held(chat: Chat) -> None:
    tokens = prompt(100)
    kv = chat._kv(tokens, 0)
    present(kv.arena).data[:] = 0xFF
    broken = Collector()
    chat.engine.submit(DecodeRequest("nan", tokens, Sampling(max_tokens=3, ignore_eos=True), kv), broken)
    broken.result()
    assert math.isnan(broken.tokens[0].logprob)
    cancelled = Collector()
    again = DecodeRequest("cancelled", tokens, Sampling(max_tokens=5000, ignore_eos=True), kv)
    chat.engine.submit(again, cancelled)
    assert cancelled.first.wait(60)
    chat.engine.cancel("cancelled")
    chat.engine.call(lambda model: None)  # after the removal
    assert (chat.engine.held_bytes, chat.engine.find_held(tokens, "")) == (0, None)


def _raise(*_: object) -> None:
    raise RuntimeError("[malloc] no memory")


def test_received_kv_that_does_not_begin_where_the_held_kv_ends_is_refused(chat: Chat) -> None:
    tokens = prompt(100)
    chat.send(tokens)[0].result()
    held = chat.engine.find_held(tokens, "")
    assert held is not None
    request = DecodeRequest("gap", [*tokens, 9, 9], Sampling(), chat._kv([*tokens, 9, 9], 98), held)
    with pytest.raises(LayoutMismatch, match=r"covers tokens \[98, 101\), but \[99, 101\) are needed"):
        chat.engine.submit(request, Collector())
    held.release()


def test_the_engine_beats_after_every_chunk_and_step(chat: Chat) -> None:
    beats: list[None] = []
    chat.engine.on_beat = lambda: beats.append(None)
    chat.send(prompt(10 * CHUNK), 5)[0].result()
    chat.engine.on_beat = lambda: None
    assert 15 <= len(beats) <= 20
