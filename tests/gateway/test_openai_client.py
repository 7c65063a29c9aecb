"""The official openai client, unchanged, against `disagg serve` in front of real servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.deadlines import wait_until
from tests.fleets import RunningFleet

if TYPE_CHECKING:  # 2 s, which only the process that runs these tests spends
    import openai

CHAT: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "def add(a, b):"}]


@pytest.fixture
def client(gateway: str) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_as_the_python_api_answers_it(client: openai.OpenAI, tiny_fleet: RunningFleet) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0)
    with tiny_fleet.client() as direct:
        expected = direct.generate("tiny", messages=CHAT, max_tokens=12)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.metrics.prompt_tokens
    assert answer.usage.completion_tokens == expected.metrics.completion_tokens
    assert answer.model == "tiny"
    again = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1)
    assert (answer.system_fingerprint or "").startswith("fp_") and answer.system_fingerprint == again.system_fingerprint


def test_the_answer_says_which_hosts_gave_it_and_how(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=4)
    disagg = answer.choices[0].model_extra["disagg"]
    assert disagg["decode_server"] == "tiny-decode"
    assert disagg["ttft"] == pytest.approx(sum(disagg["ttft_parts"].values()))
    assert disagg["warnings"] == []


def test_a_streamed_chat_has_the_same_text_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert "disagg" in (chunks[-2].choices[0].model_extra or {})


def test_a_completion_continues_a_text_and_a_list_of_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt="x = 1", max_tokens=4, temperature=0)
    ids = client.completions.create(model="tiny", prompt=[9, 10, 11], max_tokens=4, temperature=0)
    assert len(text.choices) == len(ids.choices) == 1
    assert text.usage is not None and ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_several_prompts_and_several_answers_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0).choices[0].text
        for prompt in ("x = 1", "y = 2")
    ]
    answer = client.completions.create(model="tiny", prompt=["x = 1", "y = 2"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]


def test_answers_of_one_seeded_request_differ_and_can_be_repeated(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(model="tiny", messages=CHAT, n=2, seed=7, max_tokens=16)
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert first[0] != first[1]
    assert texts() == first


def test_a_streamed_answer_of_two_choices_tells_them_apart(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=CHAT, n=2, seed=7, max_tokens=8, stream=True)
    seen: dict[int, list[str | None]] = {0: [], 1: []}
    for chunk in stream:
        seen[chunk.choices[0].index].append(chunk.choices[0].finish_reason)
    assert all(reasons[-1] in ("stop", "length") and set(reasons[:-1]) == {None} for reasons in seen.values())


def test_log_probabilities_name_tokens_by_their_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 3
    first = logprobs.content[0]
    assert answer.choices[0].message.content == "".join(one.token for one in logprobs.content)
    assert first.bytes == list(first.token.encode()) and first.logprob <= 0
    assert len(first.top_logprobs) == 2 and first.top_logprobs[0].token == first.token


def test_an_answer_without_a_bound_is_as_long_as_the_context_allows(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[9] * 4090, extra_body={"ignore_eos": True}, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "length"


def test_an_alias_is_a_name_of_the_model_and_the_list_has_its_context(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, (model.model_extra or {})["max_model_len"]) == ("tiny", 4096)
    assert client.models.retrieve("alias-of-tiny").id == "tiny"
    assert client.completions.create(model="alias-of-tiny", prompt="x", max_tokens=1).model == "alias-of-tiny"


def test_an_unknown_model_is_a_404_with_openai_s_code(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_request_over_the_context_has_openai_s_code_also_if_it_is_streamed(client: openai.OpenAI) -> None:
    import openai

    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=[9] * 4000, max_tokens=500, stream=stream)
        assert caught.value.code == "context_length_exceeded"


def test_a_field_that_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, modalities=["text", "audio"])
    assert caught.value.param == "modalities"


def test_penalties_and_biases_change_the_answer(client: openai.OpenAI) -> None:
    fixed: dict[str, Any] = {"model": "tiny", "prompt": "x = 1", "max_tokens": 64, "temperature": 0}
    plain = client.completions.create(**fixed).choices[0].text
    assert client.completions.create(**fixed, presence_penalty=2, frequency_penalty=2).choices[0].text != plain
    assert len(set(client.completions.create(**fixed, logit_bias={"64": 100}).choices[0].text)) == 1


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "feed", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
]


def fits(text: str) -> bool:
    body = json.loads(text)
    return sorted(body) == ["age", "kind"] and 1 <= body["age"] <= 99 and body["kind"] in ("cat", "dog")


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_fits_its_json_schema_even_of_a_model_with_random_weights(
    client: openai.OpenAI, temperature: float
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=60, temperature=temperature, seed=1, response_format=form
    )
    assert answer.choices[0].finish_reason == "stop"
    assert fits(answer.choices[0].message.content or "")


def test_a_tool_that_must_be_called_is_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "feed"}}
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=80, tools=TOOLS, tool_choice=named, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert call.type == "function" and call.function.name == "feed" and fits(call.function.arguments)
    chunks = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=80, tools=TOOLS, tool_choice=named, temperature=0, stream=True
    )
    streamed = [call for chunk in chunks for call in (chunk.choices[0].delta.tool_calls or ())]
    assert [one.function and one.function.arguments for one in streamed] == [call.function.arguments]


NUMBER = r"[1-9][0-9]{2}-[0-9]{3}"
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "structured_outputs": ({"structured_outputs": {"regex": NUMBER}}, NUMBER),
    "guided_choice": ({"guided_choice": ["left", "right"]}, "left|right"),
    "guided_grammar": ({"guided_grammar": 'start: "a" /[0-9]/ "b"'}, "a[0-9]b"),
    "grammar": ({"grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_the_form_that_clients_of_vllm_and_llama_cpp_ask_for(client: openai.OpenAI, name: str) -> None:
    form, pattern = FORMS[name]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "temperature": 1.2, "seed": 3, "extra_body": form}
    chat = client.chat.completions.create(messages=CHAT, **asked)
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **asked))
    text = client.completions.create(prompt="x = ", **asked).choices[0]
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
    assert re.fullmatch(pattern, text.text) and chat.choices[0].finish_reason == text.finish_reason == "stop"


def test_an_answer_is_as_long_and_ends_as_clients_of_vllm_ask_for(client: openai.OpenAI) -> None:
    fixed: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "temperature": 0, "messages": CHAT}

    def answered(**extra: Any) -> str:
        body = {"ignore_eos": True, **extra}
        whole = client.chat.completions.create(**fixed, extra_body=body).choices[0].message.content or ""
        chunks = client.chat.completions.create(**fixed, extra_body=body, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        return whole

    text = answered()
    stop = text[20:22]
    cut = answered(stop=[stop])
    assert text.startswith(cut) and answered(stop=[stop], include_stop_str_in_output=True) == cut + stop
    assert len(answered(stop=[stop], min_tokens=30)) > len(cut)
    logprobs = client.chat.completions.create(**fixed, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    word = next(one.token for one in logprobs.content or () if one.token.isalpha() and len(one.token) > 1)
    assert word in text and word not in answered(bad_words=[word])


def test_an_answer_goes_on_with_the_message_that_was_begun(client: openai.OpenAI) -> None:
    fixed: dict[str, Any] = {"model": "tiny", "temperature": 0, "messages": CHAT}
    whole = client.chat.completions.create(**fixed, max_tokens=24, logprobs=True).choices[0]
    assert whole.logprobs is not None
    first = next(iter(whole.logprobs.content or ())).token
    assert first.isascii() and (whole.message.content or "").startswith(first)
    begun = [*CHAT, {"role": "assistant", "content": first}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    asked: dict[str, Any] = {**fixed, "messages": begun, "max_tokens": 23, "extra_body": body}
    rest = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    assert first + (rest or "") == whole.message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == rest
    marked = [*CHAT, {"role": "assistant", "content": first, "prefix": True}]
    asked = {**fixed, "messages": marked, "max_tokens": 23}
    assert client.chat.completions.create(**asked).choices[0].message.content == rest
    closed = {**fixed, "messages": begun, "max_tokens": 23}
    assert client.chat.completions.create(**closed).choices[0].message.content != rest


def test_a_gap_is_refused_by_name_for_a_model_that_fills_none(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="no tokens for filling in the middle") as caught:
        client.completions.create(model="tiny", prompt="def f(", suffix=")")
    assert caught.value.param == "suffix"


def test_with_a_form_and_tools_the_answer_is_either(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    seen = set()
    for seed in (6, 7):
        asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "tools": TOOLS[:1], "response_format": form}
        asked |= {"seed": seed, "max_tokens": 80, "temperature": 1.5}
        (choice,) = client.chat.completions.create(**asked).choices
        chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
        calls = [call.function for delta in chunks for call in delta.tool_calls or () if call.function]
        assert "".join(delta.content or "" for delta in chunks) == (choice.message.content or "")
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls or []
            assert call.type == "function" and choice.message.content is None
            assert fits(call.function.arguments) and [one.arguments for one in calls] == [call.function.arguments]
        else:
            assert (choice.finish_reason, calls) == ("stop", []) and fits(choice.message.content or "")
        seen.add(choice.finish_reason)
    assert seen == {"stop", "tool_calls"}


def test_a_forced_call_that_is_cut_is_no_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "tools": TOOLS, "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**asked, max_tokens=7).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)
    chunks = list(client.chat.completions.create(**asked, max_tokens=7, stream=True))
    assert not any(chunk.choices[0].delta.content or chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_schema_that_is_none_and_tools_that_the_model_does_not_know_are_refused(client: openai.OpenAI) -> None:
    import openai

    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match=r"json_schema: .type. is not one"):
        client.chat.completions.create(model="tiny", messages=CHAT, response_format=wrong)
    with pytest.raises(openai.BadRequestError, match="tools: this model"):
        client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS)


def test_leaving_a_stream_cancels_its_request_on_the_hosts(client: openai.OpenAI, tiny_fleet: RunningFleet) -> None:
    before = tiny_fleet.status("tiny-decode")["counters"]["cancelled"]
    stream = client.completions.create(
        model="tiny", prompt="x = 1", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: tiny_fleet.status("tiny-decode")["running"] == 0, 60, "the request to end")
    assert tiny_fleet.status("tiny-decode")["counters"]["cancelled"] == before + 1


def test_paths_work_without_v1_and_a_request_id_comes_back(gateway: str) -> None:
    with httpx.Client(base_url=gateway, trust_env=False, verify=False) as http:
        answer = http.post(
            "/chat/completions",
            json={"model": "tiny", "messages": CHAT, "max_tokens": 1},
            headers={"X-Request-Id": "request-77"},
        )
        models, health, missing = http.get("/models"), http.get("/health"), http.get("/v1/embeddings")
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "request-77" and answer.json()["id"] == "chatcmpl-request-77"
    assert models.json()["data"][0]["id"] == "tiny"
    assert health.json() == {"status": "ok"}
    assert missing.status_code == 404 and "/v1/embeddings" in missing.json()["error"]["message"]


def test_a_response_is_answered_as_the_chat_is_streamed_or_not(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0)
    asked: dict[str, Any] = {"model": "tiny", "instructions": "be short", "input": "def add(a, b):"}
    asked |= {"max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        seen = list(stream)
    assert whole.output_text == chat.choices[0].message.content
    assert "".join(one.delta for one in seen if one.type == "response.output_text.delta") == whole.output_text
    assert seen[-1].type == "response.incomplete" and seen[-1].response.output_text == whole.output_text
    assert whole.usage is not None and whole.usage.output_tokens == 12


def test_a_response_calls_tools_and_its_items_can_be_sent_back(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "feed", "parameters": SCHEMA, "strict": True}
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 80, "temperature": 0, "tools": [tool]}
    asked["tool_choice"] = {"type": "function", "name": "feed"}
    with client.responses.stream(**asked, input="feed it") as stream:
        response = stream.get_final_response()
    (call,) = response.output
    assert call.type == "function_call" and fits(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "fed"}
    items: list[Any] = [{"role": "user", "content": "feed it"}, call.to_dict(), result]
    del asked["tools"], asked["tool_choice"]
    assert client.responses.create(**asked, input=items).output_text


def test_what_needs_memory_of_earlier_responses_is_refused_by_name(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_several_requests_together_have_the_answers_of_each_alone(client: openai.OpenAI, gateway: str) -> None:
    chat = {"model": "tiny", "messages": CHAT, "max_tokens": 6, "temperature": 0}
    text = {"model": "tiny", "prompt": "x = ", "max_tokens": 6, "temperature": 0}
    alone = [
        client.chat.completions.create(**chat).choices[0].message.content,
        client.completions.create(**text).choices[0].text,
    ]
    with httpx.Client(base_url=gateway, timeout=60, trust_env=False, verify=False) as http:
        together = http.post("/v1/parallel", json={"requests": [chat, text]}).json()
    first, second = (one["body"]["choices"][0] for one in together["results"])
    assert [first["message"]["content"], second["text"]] == alone
    assert together["disagg"]["complete"] == 2 and together["disagg"]["wall"] > 0


def test_a_text_is_tokenised_as_it_is_answered_and_its_tokens_are_the_text_again(
    client: openai.OpenAI, gateway: str, tiny_fleet: RunningFleet
) -> None:
    text = "def add(a, b):  # é"
    with httpx.Client(base_url=gateway, trust_env=False, timeout=60) as http:
        made = http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
        back = http.post("/detokenize", json={"model": "tiny", "tokens": made["tokens"]}).json()
    answer = client.completions.create(model="tiny", prompt=text, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens == made["count"] == len(made["tokens"])
    assert back["prompt"] == text
    with tiny_fleet.client() as direct:
        assert [token.id for token in direct.tokenize("tiny", text)] == made["tokens"]


def test_a_prompt_is_scored_with_and_without_an_answer(client: openai.OpenAI, tiny_fleet: RunningFleet) -> None:
    """As lm-eval-harness asks for the likelihood of a continuation."""
    prompt = "def add(a, b):\n"
    with tiny_fleet.client() as direct:
        expected = direct.score("tiny", prompt, top=1)
    ids = [token.id for token in expected.tokens]
    asked: dict[str, Any] = {"model": "tiny", "echo": True, "logprobs": 1, "temperature": 0}
    scored = client.completions.create(prompt=[ids, ids[:4]], max_tokens=0, **asked).choices
    answered = client.completions.create(prompt=prompt, max_tokens=1, **asked).choices[0]
    assert (scored[0].text, scored[0].finish_reason) == (prompt, "length") and answered.text.startswith(prompt)
    values = [token.logprob for token in expected.tokens]
    for choice, count in ((scored[0], len(ids)), (scored[1], 4), (answered, len(ids))):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[:count] == pytest.approx(values[:count], abs=1e-4)
    assert len(answered.logprobs.token_logprobs) == len(ids) + 1
    listed = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 2}
    ).choices[0]
    assert listed.model_extra is not None
    first, *rest = listed.model_extra["prompt_logprobs"]
    assert first is None and [entry[str(id)]["logprob"] for id, entry in zip(ids[1:], rest, strict=True)] == (
        pytest.approx(values[1:], abs=1e-4)
    )
