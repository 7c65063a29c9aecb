"""engines/model/constraint.py: what a constraint allows, and answers of both engines that have the form they must."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, DecodeRequest, DecodeTiming, Token
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.model.text import HFTokenizer
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.engines.transformers.sampling import Sampler
from disagg.errors import CapabilityMissing, RequestError
from tests import tiny_models
from tests.engines.conftest import Constrain
from tests.tiny_models import TinyModel

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: form\nform: %json {json.dumps(SCHEMA)}\n"
PROMPT = list(range(20, 60))
SAMPLING = Sampling(max_tokens=60, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyModel) -> HFTokenizer:
    return HFTokenizer.load(tiny("llama"))


def text(tokenizer: HFTokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(token) for token in tokens) + stream.finish()


class Tokens:
    """A Listener that collects the answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.done: Future[str | None] = Future()

    def on_tokens(self, tokens: list[Token], timing: DecodeTiming) -> None:
        self.tokens += [token.id for token in tokens]
        if tokens[-1].finish:
            self.done.set_result(tokens[-1].finish)

    def on_error(self, error: Exception) -> None:
        self.done.set_exception(error)


def by_mlx(engine: MLXDecodeEngine, tokenizer: HFTokenizer, constrain: Constrain, given: list[int]) -> list[int]:
    listener = Tokens()
    constraint = constrain(tokenizer, GRAMMAR, given)
    request = DecodeRequest("one", PROMPT + given, SAMPLING, answered=len(given), constraint=constraint)
    engine.submit(request, listener)  # type: ignore[arg-type]  # a fake
    assert listener.done.result(60) == "stop"
    return listener.tokens


def by_torch(
    engine: TransformersPrefillEngine, tokenizer: HFTokenizer, constrain: Constrain, given: list[int]
) -> list[int]:
    made: list[Token] = []
    constraint = constrain(tokenizer, GRAMMAR, given)
    run = engine.start_answer(AnswerRequest(PROMPT + given, SAMPLING, len(given), constraint=constraint), made.append)
    while not run.done:
        run.step()
    assert made[-1].finish == "stop"
    return [token.id for token in made]


def test_both_engines_write_the_same_json_and_another_host_goes_on_with_it(
    tiny: TinyModel, mlx_engine: Callable[[str], MLXDecodeEngine], tokenizer: HFTokenizer, constrain: Constrain
) -> None:
    decode = mlx_engine("llama")
    prefill = TransformersPrefillEngine(tiny("llama"), 8192, EngineOptions("transformers", dtype="float32"))
    whole = by_mlx(decode, tokenizer, constrain, [])
    body = json.loads(text(tokenizer, whole))
    assert sorted(body) == ["a", "b"] and 0 <= body["a"] <= 99 and body["b"] in ("x", "y")
    assert by_torch(prefill, tokenizer, constrain, []) == whole
    assert (
        by_torch(prefill, tokenizer, constrain, whole[:4])
        == by_mlx(decode, tokenizer, constrain, whole[:4])
        == whole[4:]
    )


def test_only_tokens_that_fit_are_allowed_and_the_end_only_where_it_may_come(
    tokenizer: HFTokenizer, constrain: Constrain
) -> None:
    constraint = constrain(tokenizer, GRAMMAR)
    seen = []
    while (allowed := constraint.allowed()) is not None:
        seen.append(int(np.flatnonzero(allowed)[0]))
        assert bool(allowed[tiny_models.EOS_ID]) is (seen[-1] in tokenizer.eos_ids)
        constraint.accept(seen[-1])
    assert json.loads(text(tokenizer, seen))["b"] in ("x", "y")
    assert constraint.error is None


def test_an_answer_is_free_until_its_reasoning_has_ended(tokenizer: HFTokenizer, constrain: Constrain) -> None:
    constraint = constrain(tokenizer, GRAMMAR, [5, 6], tiny_models.END_OF_TURN)
    assert constraint.allowed() is None
    constraint.accept(tiny_models.END_OF_TURN_ID)
    allowed = constraint.allowed()
    assert allowed is not None and {tokenizer.token_bytes(int(id))[:1] for id in np.flatnonzero(allowed)} == {b"{"}


def test_a_token_that_does_not_fit_is_an_error_of_the_request(tokenizer: HFTokenizer, constrain: Constrain) -> None:
    constraint = constrain(tokenizer, GRAMMAR)
    constraint.accept(tokenizer.encode("z")[-1])
    assert constraint.allowed() is None and isinstance(constraint.error, RequestError)
    with pytest.raises(RequestError, match="answer_tokens"):
        constrain(tokenizer, GRAMMAR, [tokenizer.encode("z")[-1]])


def test_an_answer_that_has_left_its_form_ends_on_a_prefill_host_too(
    tokenizer: HFTokenizer, constrain: Constrain
) -> None:
    logits = torch.zeros(tokenizer.vocab_size)
    broken = constrain(tokenizer, GRAMMAR)
    broken.accept(tokenizer.encode("z")[-1])
    with pytest.raises(RequestError, match="left its form"):
        Sampler(Sampling(), PROMPT, 0, broken).next(logits)
    free = constrain(tokenizer, GRAMMAR, [5], tiny_models.END_OF_TURN)
    sampler = Sampler(Sampling(), PROMPT, 0, free)
    logits[tokenizer.encode("z")[-1]] = 9
    sampler.next(logits)
    free.accept(tiny_models.END_OF_TURN_ID)
    free.accept(tokenizer.encode("z")[-1])
    with pytest.raises(RequestError, match="left its form"):
        sampler.next(logits)


def test_a_host_without_llguidance_lacks_a_capability(
    tiny: TinyModel, constrain: Constrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(CapabilityMissing, match="llguidance is not installed"):
        constrain(HFTokenizer.load(tiny("llama")), GRAMMAR)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [({"type": "objekt"}, "type"), ({"type": "string", "pattern": "("}, "regular expression"), ({"not": {}}, "not")],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(
    tokenizer: HFTokenizer, constrain: Constrain, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=f"json_schema: .*{reason}"):
        constrain(tokenizer, f"start: form\nform: %json {json.dumps(schema)}\n")
