"""KV of finished requests: a request that begins with held tokens gets exactly the answer of one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, HeldKV
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.kv.received import ReceivedKV
from tests.engines.mlx.mlx_parts import Collector, Reference, References, prompt
from tests.tiny_models import WINDOW, TinyModel

MODELS = ["llama", "gpt_oss", "gemma3_text"]  # full, sliding and full, mostly sliding
CHUNK = 48


@dataclass
class Chat:
    """An engine and transformers on one model. send: submits a request that uses what is held for it."""

    engine: MLXDecodeEngine
    reference: Reference
    requests: int = 0

    def send(
        self, tokens: Sequence[int], count: int = 24, *, salt: str = "", ship: bool = False, answered: int = 0
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
            Sampling(max_tokens=count, ignore_eos=True),
            kv=kv,
            held=held,
            answered=answered,
            salt=salt,
        )
        self.engine.submit(request, collector)
        return collector, start

    def _kv(self, tokens: Sequence[int], start: int) -> ReceivedKV:
        return self.reference.kv(tokens[:-1], self.engine.info.layout, start)


class _Releasing(Collector):
    """Releases the held KV at the first token, as the server does."""

    def __init__(self, held: HeldKV | None) -> None:
        super().__init__()
        self.held = held

    def on_tokens(self, tokens, timing) -> None:  # type: ignore[no-untyped-def]
        if self.held is not None:
            self.held.release()
        super().on_tokens(tokens, timing)


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
    assert (held, answer.result()) == (0, chat.reference.greedy(first, 24))
    second = [*first, *answer.ids, *prompt(new, seed=2)]

    answer, held = chat.send(second, ship=ship)

    assert held == min(len(first) + 24, len(second) - 1)
    assert answer.result() == chat.reference.greedy(second, 24)
    assert answer.timing.computed_prompt_tokens == (1 if ship else len(second) - held)
