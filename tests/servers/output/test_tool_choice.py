"""A server whose model may call tools, or answer in text: its template gets the tools, and its calls are told apart."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from disagg.api.events import DoneEvent, TokensEvent
from disagg.api.requests import GenerateBody
from disagg.api.sampling import Sampling
from disagg.engines.base import Token
from disagg.engines.model.text import HFTokenizer
from disagg.engines.simulated.model import SimulatedModel
from disagg.servers.host.service import AnyService
from tests import tiny_models
from tests.engines.model.test_format import TEMPLATE
from tests.servers.host.test_service import answer, serving

TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[AnyService]:
    made = copy.deepcopy(tiny_models.tokenizer())
    made.chat_template = TEMPLATE
    async with serving(tmp_path, "m-prefill") as one:
        one.engine.tokenizer = HFTokenizer(made, frozenset({tiny_models.EOS_ID}), len(made))
        yield one


async def answered(
    service: AnyService, monkeypatch: pytest.MonkeyPatch, text: str, **fields: object
) -> tuple[str, list[TokensEvent], DoneEvent]:
    """The prompt that the model got, and the events of its answer, which is `text`."""
    written = [Token(token, 0.0) for token in service.engine.tokenizer.encode(text)]
    written[-1] = Token(written[-1].id, 0.0, finish="stop")
    prompts: list[Sequence[int]] = []

    def scripted(model: SimulatedModel, tokens: Sequence[int], sampling: Sampling, *rest: object) -> Iterator[Token]:
        prompts.append(tokens)
        return iter(written)

    monkeypatch.setattr(SimulatedModel, "answer", scripted)
    messages = [{"role": "user", "content": "How is it in Bern?"}]
    body = GenerateBody.from_json({"model": "m", "messages": messages, "sampling": {"max_tokens": 200}, **fields})
    events = [event async for event in answer(service, "/generate", body)]
    stream = service.engine.tokenizer.stream()
    prompt = "".join(map(stream.push, prompts[0])) + stream.finish()
    done = events[-1]
    assert isinstance(done, DoneEvent)
    return prompt, [event for event in events if isinstance(event, TokensEvent)], done


async def test_a_model_that_may_call_tools_calls_one(service: AnyService, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, events, done = await answered(service, monkeypatch, f"Let me see. {CALL}", tools=[TOOL])
    assert prompt.startswith("<tools>") and '"weather"' in prompt and "</tools>user: How is it in Bern?" in prompt
    assert "".join(event.text for event in events) == "Let me see."
    (call,) = (call for event in events for call in event.tool_calls)
    assert (call.name, call.arguments, done.finish_reason) == ("weather", {"city": "Bern"}, "tool_calls")


async def test_a_model_that_may_call_tools_answers_in_text(
    service: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, events, done = await answered(service, monkeypatch, "I <think> not.", tools=[TOOL])
    assert "".join(event.text for event in events) == "I <think> not."
    assert (sum(len(event.tool_calls) for event in events), done.finish_reason) == (0, "stop")


async def test_without_tools_a_call_is_text(service: AnyService, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, events, done = await answered(service, monkeypatch, CALL)
    assert prompt.startswith("user:")
    assert ("".join(event.text for event in events), done.finish_reason) == (CALL, "stop")


GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


async def test_what_fills_a_gap_ends_where_another_file_would_begin(
    service: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copy.deepcopy(tiny_models.tokenizer())
    made.add_special_tokens({"additional_special_tokens": [*GAP, "<|file_sep|>"]})
    service.engine.tokenizer = HFTokenizer(made, frozenset({tiny_models.EOS_ID}), len(made))
    asked: list[tuple[Sequence[int], Sampling]] = []

    def scripted(model: SimulatedModel, tokens: Sequence[int], sampling: Sampling, *rest: object) -> Iterator[Token]:
        asked.append((tokens, sampling))
        written = [*made.encode("a, b", add_special_tokens=False), made.convert_tokens_to_ids("<|file_sep|>")]
        return (Token(token, 0.0, finish="stop" if token == written[-1] else None) for token in written)

    monkeypatch.setattr(SimulatedModel, "answer", scripted)
    body = GenerateBody(model="m", prompt="def f(", suffix="):", sampling=Sampling(max_tokens=20))
    events = [event async for event in answer(service, "/generate", body)]
    ((prompt, sampling),) = asked
    assert made.decode(prompt) == "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"
    assert set(sampling.stop_token_ids) == set(made.convert_tokens_to_ids([*GAP, "<|file_sep|>"]))
    assert "".join(event.text for event in events if isinstance(event, TokensEvent)) == "a, b"
