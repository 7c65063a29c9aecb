"""engines/model/format.py and token_bytes.py, and chat templates with tools: what a tokenizer's files say."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from disagg.api.requests import GenerateBody
from disagg.engines.model import format
from disagg.engines.model.stream import token_bytes
from disagg.engines.model.text import HFTokenizer
from disagg.errors import RequestError
from tests import tiny_models

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tools>{{ tool | tojson }}</tools>{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}"
    "<tool_call>{{ tool_call.name }}{% for name, value in tool_call.arguments.items() %} {{ name }}={{ value }}"
    "{% endfor %}</tool_call>{% endfor %}\n{% endfor %}{% if effort %}effort {{ effort }}{% endif %}"
)


def tokenizer(template: str = tiny_models.CHAT_TEMPLATE, *added: str) -> Any:
    made = copy.deepcopy(tiny_models.tokenizer())
    made.add_tokens(list(added))
    made.chat_template = template
    return made


def test_the_format_of_a_model_is_found_by_its_template_and_vocabulary() -> None:
    plain = format.find(tokenizer())
    assert (plain.think, plain.tools, plain.harmony) == (None, None, None)
    found = format.find(tokenizer(TEMPLATE, "<think>", "</think>"))
    assert found.think == ("<think>", "</think>") and found.tools is not None
    assert found.tools.parse('{"name": "f", "arguments": {}}', []) == {"name": "f", "arguments": {}}
    assert tiny_models.TURN_ID in found.hidden
    gpt_oss = format.find(tokenizer(TEMPLATE, *(f"<|{name}|>" for name in format.HARMONY)))
    assert gpt_oss.harmony is not None and len(gpt_oss.harmony) == 7


def test_a_template_gets_tools_earlier_calls_and_its_variables() -> None:
    body = GenerateBody.from_json(
        {
            "model": "m",
            "messages": [
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
                {"role": "tool", "content": "2"},
            ],
            "tools": [{"name": "f"}],
            "chat_template_kwargs": {"effort": "high"},
        }
    )
    hf = HFTokenizer(tokenizer(TEMPLATE), frozenset({1}), tiny_models.VOCAB)
    stream = hf.stream()
    text = "".join(stream.push(token) for token in hf.encode(body.content, body.template)) + stream.finish()
    tool = '{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}'
    assert text == f"<tools>{tool}</tools>assistant: <tool_call>f a=1</tool_call>tool: 2effort high"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt"])
def test_what_is_no_variable_of_a_template_is_refused(name: str) -> None:
    hf = HFTokenizer(tokenizer(), frozenset({1}), tiny_models.VOCAB)
    with pytest.raises(RequestError, match=f"chat_template_kwargs: {name}"):
        hf.encode([{"role": "user", "content": "x"}], {name: True})


def test_the_bytes_of_the_tokens_of_a_text_are_those_of_the_text() -> None:
    hf = HFTokenizer(tokenizer(), frozenset({1}), tiny_models.VOCAB)
    text = "Two boats 🙂, naïve\n 東京"
    assert b"".join(map(hf.token_bytes, hf.encode(text))) == text.encode()
    assert (hf.token_bytes(tiny_models.TURN_ID), hf.token_bytes(10**6)) == (b"<|turn|>", b"")
    of = token_bytes({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}, "added_tokens": None})
    assert (of("<0xE2>"), of("▁a")) == (b"\xe2", b" a")
