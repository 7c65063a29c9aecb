"""Answers of simulated engines that must have a form: they fit it, on both kinds of host."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from disagg.api.requests import GenerateBody, Tool
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, DecodeRequest, DecodeTiming, Token
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.format import AnswerFormat
from disagg.engines.simulated import model
from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.engines.simulated.model import END, SimulatedModel
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.errors import RequestError
from disagg.servers.output.grammar import grammar_of
from tests.engines.conftest import Constrain
from tests.simulated import write_config

PATIENCE_S = 60.0
OPTIONS = EngineOptions("simulated")
PROMPT = [7, 8, 9]
LONG = Sampling(max_tokens=4000)
TEXT = {"type": "string", "maxLength": 60}
GRADE = {
    "type": "object",
    "properties": {"points": {"type": "integer", "minimum": 0, "maximum": 4}, "comment": TEXT},
    "required": ["points", "comment"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": GRADE,
    "nested": {"type": "object", "properties": {"one": GRADE, "two": GRADE}, "required": ["one", "two"]},
    "list": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    "enum": {"enum": ["left", "right"]},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "number": {"type": "number"},
    "either": {"anyOf": [{"type": "integer"}, TEXT]},
    "pattern": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
    "free text": {"type": "string"},
    "any object": {"type": "object"},
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> SimulatedModel:
    return model.load(write_config(tmp_path_factory.mktemp("model")), 16384, OPTIONS, "h200-sxm")


@pytest.fixture
def decode(tmp_path: Path) -> Iterator[SimulatedDecodeEngine]:
    engine = SimulatedDecodeEngine(write_config(tmp_path), 16384, OPTIONS, "h200-sxm")
    yield engine
    engine.close()


class Listener:
    """An answer's tokens; `outcome` has its end, or its error."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.outcome: queue.Queue[Exception | None] = queue.Queue()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self.tokens += tokens
        if tokens[-1].finish:
            self.outcome.put(None)

    def on_error(self, error: Exception) -> None:
        self.outcome.put(error)


class Failing(Constraint):
    """A form that cannot go on after some letters."""

    def __init__(self, letters: int) -> None:
        self.left = letters
        self.error = None

    pending = True

    def accept(self, token: int) -> None:
        self.left -= 1
        if self.left == 0:
            self.error = RequestError("the answer left its form")

    def allowed(self) -> None:
        return None


def grammar(schema: dict[str, Any]) -> str:
    found = grammar_of(GenerateBody(model="m", prompt="x", json_schema=schema), AnswerFormat())
    assert found is not None
    return found


def text(simulated: SimulatedModel, tokens: Sequence[Token]) -> str:
    stream = simulated.tokenizer.stream()
    return "".join(stream.push(token.id) for token in tokens) + stream.finish()


@pytest.mark.parametrize("prompt", [[1], [2], PROMPT], ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_fits_its_schema_and_ends(
    simulated: SimulatedModel, constrain: Constrain, name: str, prompt: list[int]
) -> None:
    constraint = constrain(simulated.tokenizer, grammar(SCHEMAS[name]))
    answer = list(simulated.answer(prompt, LONG, constraint=constraint))
    jsonschema_rs.validate(SCHEMAS[name], json.loads(text(simulated, answer)))
    assert [token.finish for token in answer] == [None] * (len(answer) - 1) + ["stop"]


def test_a_call_that_must_be_made_is_made(simulated: SimulatedModel, constrain: Constrain) -> None:
    tool = Tool(name="add", parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    found = grammar_of(GenerateBody(model="m", prompt="x", tools=(tool,), must_call=("add",)), AnswerFormat())
    assert found is not None
    answer = list(simulated.answer(PROMPT, LONG, constraint=constrain(simulated.tokenizer, found)))
    call = json.loads(text(simulated, answer))
    assert call["name"] == "add" and isinstance(call["arguments"]["a"], int)


def test_both_engines_write_the_same_json_and_another_host_goes_on_with_it(
    decode: SimulatedDecodeEngine, constrain: Constrain, tmp_path: Path
) -> None:
    prefill = SimulatedPrefillEngine(write_config(tmp_path), 16384, OPTIONS, "h200-sxm")

    def by_decode(given: list[int]) -> list[int]:
        listener, constraint = Listener(), constrain(decode.tokenizer, grammar(GRADE), given)
        request = DecodeRequest("a", PROMPT + given, LONG, answered=len(given), constraint=constraint)
        decode.submit(request, listener)
        assert listener.outcome.get(timeout=PATIENCE_S) is None
        return [token.id for token in listener.tokens]

    def by_prefill(given: list[int]) -> list[int]:
        made: list[Token] = []
        constraint = constrain(prefill.tokenizer, grammar(GRADE), given)
        run = prefill.start_answer(AnswerRequest(PROMPT + given, LONG, len(given), constraint=constraint), made.append)
        while not run.done:
            run.step()
        return [token.id for token in made]

    whole = by_decode([])
    assert whole[-1] == END and END in decode.info.eos_ids
    assert by_prefill([]) == whole
    assert by_prefill(whole[:9]) == by_decode(whole[:9]) == whole[9:]


def test_an_answer_that_reaches_max_tokens_is_cut(simulated: SimulatedModel, constrain: Constrain) -> None:
    constraint = constrain(simulated.tokenizer, grammar(GRADE))
    answer = list(simulated.answer(PROMPT, Sampling(max_tokens=5), constraint=constraint))
    assert (len(answer), answer[-1].finish) == (5, "length")


def test_an_answer_that_ignores_its_end_goes_on_to_max_tokens(simulated: SimulatedModel, constrain: Constrain) -> None:
    constraint = constrain(simulated.tokenizer, grammar({"enum": ["a"]}))
    answer = list(simulated.answer(PROMPT, Sampling(max_tokens=50, ignore_eos=True), constraint=constraint))
    assert (len(answer), answer[-1].finish) == (50, "length")
    assert text(simulated, answer[:3]) == '"a"' and answer[3].id == END


def test_an_answer_that_leaves_its_form_fails_alone(decode: SimulatedDecodeEngine) -> None:
    broken, whole = Listener(), Listener()
    decode.submit(DecodeRequest("a", PROMPT, LONG, constraint=Failing(3)), broken)
    decode.submit(DecodeRequest("b", PROMPT, Sampling(max_tokens=9)), whole)
    assert isinstance(broken.outcome.get(timeout=PATIENCE_S), RequestError)
    assert whole.outcome.get(timeout=PATIENCE_S) is None
    assert (len(broken.tokens), len(whole.tokens)) == (3, 9)
    assert (decode.running, decode.kv_bytes) == (0, 0)
