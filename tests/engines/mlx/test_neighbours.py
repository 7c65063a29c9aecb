"""An answer in bfloat16 does not depend on what the requests that decode beside it ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import pytest

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.model.constraint import Constraint
from tests.deadlines import wait_until
from tests.engines.mlx.mlx_parts import Collector, held_up, prompt, start
from tests.tiny_models import VOCAB, TinyModel

TOKENS = 16
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "greedy, with log-probabilities": {"logprobs": 5},
    "seed": {"temperature": 1.0, "seed": 7},
    "no seed": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "seed": 8, "top_k": 20, "logprobs": 2},
    "top_p": {"temperature": 0.8, "seed": 9, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "seed": 10, "min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence penalty": {"presence_penalty": 0.7, "logprobs": 3},
    "frequency penalty": {"frequency_penalty": 0.4, "temperature": 0.9, "seed": 11},
    "logit_bias": {"logit_bias": ((3, 2.5), (9, -100.0))},
}


class Even:
    """A Constraint: every token of an even id may come next."""

    error = None
    pending = False

    def accept(self, token: int) -> None: ...

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        even: np.ndarray[Any, np.dtype[np.bool_]] = np.arange(VOCAB) % 2 == 0
        return even


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[MLXDecodeEngine]:
    options = EngineOptions("mlx", dtype="bfloat16", device="cpu", chunk_tokens=32, max_batch=4)
    engine = MLXDecodeEngine(tiny("llama"), 4096, options)
    yield engine
    engine.close()


def constrained(engine: MLXDecodeEngine) -> Collector:
    collector, sampling = Collector(), Sampling(max_tokens=TOKENS, ignore_eos=True)
    form = cast(Constraint, Even())
    engine.submit(DecodeRequest("constrained", prompt(21), sampling, None, constraint=form), collector)
    return collector


def answer(engine: MLXDecodeEngine, request: str, beside: str = "") -> list[Any]:
    """All that is said about the tokens of an answer, which decodes from the first to the last one beside another."""
    with held_up(engine):
        ours = start(engine, prompt(20), max_tokens=TOKENS, **REQUESTS[request])
        if beside == "constraint":
            other = [constrained(engine)]
        else:
            other = [start(engine, prompt(21), max_tokens=TOKENS, **REQUESTS[beside])] if beside else []
    for one in (ours, *other):
        one.result()
    wait_until(lambda: engine.running == 0)
    engine.give_up_held(engine.held_bytes)
    return [(token.id, token.logprob, token.top) for token in ours.tokens]


@pytest.mark.parametrize("request_", ["greedy, with log-probabilities", "top_k", "presence penalty", "logit_bias"])
def test_an_answer_is_the_same_whatever_its_neighbour_asks_for(engine: MLXDecodeEngine, request_: str) -> None:
    expected = answer(engine, request_, beside="greedy")
    differing = [beside for beside in REQUESTS if answer(engine, request_, beside) != expected]
    assert not differing


@pytest.mark.parametrize("request_", ["greedy, with log-probabilities", "seed", "repetition penalty"])
def test_a_request_whose_answer_has_a_form_decodes_beside_no_other(engine: MLXDecodeEngine, request_: str) -> None:
    assert answer(engine, request_, beside="constraint") == answer(engine, request_)


def test_log_probabilities_are_finer_than_the_numbers_that_the_model_computes_with(engine: MLXDecodeEngine) -> None:
    """bfloat16 has 256 numbers between two powers of two: of 8 significant bits nothing else would be left over."""
    stated = np.array([logprob for _, logprob, _ in answer(engine, "greedy")], np.float32)
    assert np.any(stated.view(np.uint32) & 0xFFFF)
