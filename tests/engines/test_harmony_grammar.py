"""servers/output/grammar.py with llguidance and the special tokens of gpt-oss: which answers have the form."""

from __future__ import annotations

import asyncio
import copy
import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from disagg.api.requests import GenerateBody
from disagg.engines.model import format
from disagg.engines.model.constraint import Constraints
from disagg.errors import RequestError
from disagg.servers.output.grammar import grammar_of
from tests import tiny_models

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = GenerateBody.from_json({"model": "m", "messages": MESSAGES, "json_schema": SCHEMA})
CALL = GenerateBody.from_json(
    {"model": "m", "messages": MESSAGES, "tools": [{"name": "f", "parameters": SCHEMA}], "must_call": ["f"]}
)
EITHER = GenerateBody.from_json(
    {"model": "m", "messages": MESSAGES, "tools": [{"name": "f", "parameters": SCHEMA}], "regex": "[0-9]+ °"}
)
THOUGHT = "<|channel|>analysis<|message|>what { is it?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALLED = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

ANSWERS = [
    (JSON, FINAL + '{"a":1}', True),
    (JSON, THOUGHT + FINAL + '{"a":1}', True),
    (JSON, THOUGHT + THOUGHT + FINAL + '{"a":1}', True),
    (JSON, THOUGHT, False),
    (JSON, FINAL + '{"a":', False),
    (JSON, FINAL + '{"b":1}', None),
    (JSON, '{"a":1}', None),
    (JSON, "<|channel|>commentary<|message|>hello", None),
    (JSON, "<|channel|>analysis<|message|>what is it?<|return|>", None),
    (CALL, THOUGHT + FINAL + '{"name": "f", "arguments": {"a":1}}', True),
    (CALL, THOUGHT + FINAL + '{"name": "g"', None),
    (EITHER, THOUGHT + FINAL + "21 °", True),
    (EITHER, THOUGHT + FINAL + "warm", None),
    (EITHER, THOUGHT + CALLED + '{"a":1}', True),
    (EITHER, CALLED + '{"a":', False),
    (EITHER, CALLED.replace("functions.f", "functions.g"), None),
]


@pytest.fixture(scope="module")
def gpt_oss() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the marks of gpt-oss."""
    made = copy.deepcopy(tiny_models.tokenizer())
    made.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in format.HARMONY]})
    return made


@pytest.fixture(scope="module")
def constraints(gpt_oss: PreTrainedTokenizerFast) -> Constraints:
    ends = frozenset({tiny_models.EOS_ID, gpt_oss.convert_tokens_to_ids("<|return|>")})
    return Constraints(gpt_oss.backend_tokenizer.to_str, len(gpt_oss), ends)


@pytest.mark.parametrize(("body", "text", "complete"), ANSWERS)
def test_an_answer_of_gpt_oss_may_reason_and_has_its_form_in_the_final_channel(
    gpt_oss: PreTrainedTokenizerFast,
    constraints: Constraints,
    body: GenerateBody,
    text: str,
    complete: bool | None,
) -> None:
    """complete: whether the answer may end here; None if it must not be written at all."""
    grammar = grammar_of(body, format.find(gpt_oss))
    assert grammar is not None and json.dumps(SCHEMA)[1:-1] in grammar
    tokens = gpt_oss.encode(text, add_special_tokens=False)
    if complete is None:
        with pytest.raises(RequestError, match="form"):
            asyncio.run(constraints.make(grammar, tokens))
        return
    constraint = asyncio.run(constraints.make(grammar, tokens))
    allowed = constraint.allowed()
    constraint.close()
    assert allowed is not None
    assert bool(np.asarray(allowed)[tiny_models.EOS_ID]) is complete
