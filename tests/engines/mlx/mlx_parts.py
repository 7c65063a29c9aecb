"""What the mlx tests share: a recording listener, and transformers as the reference that also makes KV."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from disagg.api.layout import Layout
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeRequest, DecodeTiming, Token
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.model.architectures.weights import tie_in_transformers
from disagg.engines.transformers.load import causal_class
from disagg.kv.received import ReceivedKV
from tests.received import received
from tests.tiny_models import VOCAB

DEADLINE_S = 60.0
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Collector:
    """A listener that records all calls. `timing` is the engine's own object, read after the end."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.calls: list[int] = []
        self.timing = DecodeTiming()
        self.error: Exception | None = None
        self.finished = 0.0  # time.monotonic()
        self.first = threading.Event()
        self.ended = threading.Event()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.tokens.extend(tokens)
        self.calls.append(len(tokens))
        self.timing = timing
        self.first.set()
        if tokens[-1].finish:
            self.finished = time.monotonic()
            self.ended.set()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def result(self) -> list[int]:
        """The token ids, once the request has ended well."""
        assert self.ended.wait(DEADLINE_S), "the request did not end"
        if self.error is not None:
            raise self.error
        return self.ids


_next_id = iter(range(10**9))


def start(engine: MLXDecodeEngine, tokens: Sequence[int], kv: ReceivedKV | None = None, **sampling: Any) -> Collector:
    """Submit a request under an id of its own."""
    collector = Collector()
    options = {"max_tokens": 64, "ignore_eos": True, **sampling}
    engine.submit(DecodeRequest(f"r{next(_next_id)}", list(tokens), Sampling(**options), kv), collector)
    return collector


@contextmanager
def held_up(engine: MLXDecodeEngine) -> Iterator[None]:
    """The engine's thread, busy until the block ends."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(model: object) -> None:
        reached.set()
        go_on.wait(60)

    occupant = threading.Thread(target=engine.call, args=(wait,))
    occupant.start()
    assert reached.wait(60)
    try:
        yield
    finally:
        go_on.set()
        occupant.join()


_F = TypeVar("_F", bound=Callable[..., Any])


def _no_grad(function: _F) -> _F:
    """torch.no_grad(), which is untyped."""
    return cast(_F, torch.no_grad()(function))


class Reference:
    """transformers on the same checkpoint: the answer it gives alone, and the KV it would hand over."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        config = AutoConfig.from_pretrained(path)
        known = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else causal_class(config)
        self.model: Any = known.from_pretrained(path, dtype=TORCH_DTYPES[dtype]).eval()
        tied = bool(json.loads((path / "config.json").read_text()).get("tie_word_embeddings"))
        tie_in_transformers(self.model, {"lm_head.weight"}, tied=tied)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, tokens: Sequence[int], count: int = 64, *, draft: Sequence[int] = ()) -> list[int]:
        """The greedy answer of `count` tokens. draft: what it may be, e.g. the answer of the other framework. One pass
        gives the choice after each of its tokens; what follows the first wrong one is computed token by token."""
        known = self._answers.get(tuple(tokens), [])
        if len(known) < count:
            known = self._answers[tuple(tokens)] = self._answer(list(tokens), count, list(draft[:count]))
        return known[:count]

    @_no_grad
    def _answer(self, tokens: list[int], count: int, draft: list[int]) -> list[int]:
        answer, cache = [], DynamicCache()
        if draft:
            choices = self.model(torch.tensor([tokens + draft])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
            right = next((at for at, token in enumerate(draft) if token != choices[at]), len(draft))
            answer = [*draft[:right], choices[right]]
        feed = [*tokens, *answer]
        while len(answer) < count:
            logits = self.model(torch.tensor([feed]), past_key_values=cache, use_cache=True).logits
            feed = [int(logits[0, -1].argmax())]
            answer += feed
        return answer[:count]

    @_no_grad
    def logits(self, tokens: Sequence[int], last: int) -> Any:
        return self.model(torch.tensor([list(tokens)])).logits[0, -last:].float().numpy()

    @_no_grad
    def kv(self, tokens: Sequence[int], layout: Layout, start: int = 0) -> ReceivedKV:
        """KV of all `tokens` from `start` on, the rows that `layout` keeps."""
        if start >= len(tokens):
            empty: list[Any] = [np.zeros(0, dtype=np.uint8) for _ in layout.layers]
            return received(layout, len(tokens), empty, empty, start=start)
        cache = DynamicCache()  # without a config every layer keeps all its rows
        self.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        keys, values = [], []
        for layer, held in zip(layout.layers, cache.layers, strict=True):
            rows = layer.rows(len(tokens), start)
            keys.append(_bytes(held.keys, rows))
            values.append(_bytes(held.values, rows))
        return received(layout, len(tokens), keys, values, start=start)


def _bytes(tensor: torch.Tensor, rows: range) -> Any:
    kept = tensor[0, :, rows.start : rows.stop].contiguous()
    return kept.view(torch.uint8).numpy().reshape(-1)


def counting(call: Callable[..., Any], fed: list[int]) -> Callable[..., Any]:
    """A model's `__call__` that appends to `fed` the number of tokens it was called with."""

    def counted(self: object, x: Any, **options: Any) -> Any:
        fed.append(x.size)
        return call(self, x, **options)

    return counted


def prompt(length: int, seed: int = 1) -> list[int]:
    """Random token ids, no special tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(8, VOCAB, length)]


Engines = Callable[[str], MLXDecodeEngine]  # architecture -> engine: what the fixture `mlx_engine` is
References = Callable[[str], Reference]  # architecture -> transformers on it: what the fixture `reference` is
