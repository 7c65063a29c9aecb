"""OpenAI's Python client."""

from __future__ import annotations

import json
from typing import Any, Literal

from checks import KEY, MODEL, PET, QUESTION, V1, WEATHER, is_pet, need, refused, run
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
FLAT: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
PET_FORM: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
SHORT: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 24}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool


def chat() -> None:
    answer = client.chat.completions.create(**SHORT)
    need(answer.choices[0].message.content and answer.usage.completion_tokens, "no text or no usage")


def stream() -> None:
    chunks = list(client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True}))
    need(len(chunks) > 4 and chunks[-1].usage and not chunks[-1].choices, "no chunk with the usage at the end")


def logprobs() -> None:
    answer = client.chat.completions.create(**SHORT, logprobs=True, top_logprobs=3)
    need(len(answer.choices[0].logprobs.content[0].top_logprobs) == 3, "no three alternatives")


def several() -> None:
    need(len(client.chat.completions.create(**SHORT, n=3).choices) == 3, "no three answers")


def seed() -> None:
    texts = {client.chat.completions.create(**SHORT, seed=7).choices[0].message.content for _ in range(2)}
    need(len(texts) == 1, "two answers of one seed differ")


def json_object() -> None:
    answer = client.chat.completions.create(**SHORT | {"max_tokens": 200}, response_format={"type": "json_object"})
    text = answer.choices[0].message.content
    need(answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict), "no object")


def json_schema() -> None:
    answer = client.chat.completions.create(**SHORT | {"max_tokens": 200}, response_format=PET_FORM)
    need(is_pet(answer.choices[0].message.content), "not of the form")


def parse() -> None:
    answer = client.chat.completions.parse(**SHORT | {"max_tokens": 400}, response_format=Pet, temperature=0)
    need(isinstance(answer.choices[0].message.parsed, Pet), "no Pet")


def forced_tool() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**SHORT | {"max_tokens": 200}, tools=[STRICT], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        need(set(json.loads(call.function.arguments)) == {"city", "unit"}, "other arguments")


def tool_loop() -> None:
    answer = client.chat.completions.create(**SHORT | {"max_tokens": 200}, tools=[TOOL], tool_choice="required")
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    again = client.chat.completions.create(**SHORT | {"messages": [*ASKED, message, result]}, tools=[TOOL])
    need(again.choices[0].finish_reason, "no answer to the result")


def streamed_tool() -> None:
    with client.chat.completions.stream(
        **SHORT | {"max_tokens": 200}, tools=[STRICT], tool_choice="required"
    ) as events:
        final = events.get_final_completion()
    need(final.choices[0].message.tool_calls[0].function.name == "weather", "no call")


def one_call() -> None:
    answer = client.chat.completions.create(**SHORT, tools=[TOOL], parallel_tool_calls=False)
    need(answer.choices[0].finish_reason, "no answer")


def form_and_tools() -> None:
    answer = client.chat.completions.create(
        **SHORT | {"max_tokens": 200}, tools=[STRICT], tool_choice="auto", response_format=PET_FORM
    )
    message = answer.choices[0].message
    need(message.tool_calls or is_pet(message.content), "neither a call nor the form")


def custom_tool() -> None:
    tool: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
    answer = client.chat.completions.create(**SHORT | {"max_tokens": 200}, tools=[tool], tool_choice="required")
    need(answer.choices[0].message.tool_calls[0].custom.name == "shell", "no custom call")


def allowed_tools() -> None:
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
    }
    answer = client.chat.completions.create(**SHORT | {"max_tokens": 200}, tools=[TOOL], tool_choice=choice)
    need(answer.choices[0].message.tool_calls, "no call")


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="def add(a, b):", max_tokens=8, stop="\n\n", logprobs=2)
    need(answer.choices[0].text and answer.choices[0].logprobs.top_logprobs, "no text or no alternatives")


def scores() -> None:
    answer = client.completions.create(model=MODEL, prompt="def add(a, b):", max_tokens=0, echo=True, logprobs=1)
    found = answer.choices[0].logprobs.token_logprobs
    need(found[0] is None and len(found) > 3 and all(value <= 0 for value in found[1:]), "no scores")


def fill_in() -> None:
    client.completions.create(model=MODEL, prompt="def add(a, b):\n", suffix="\n\nprint(add(1, 2))", max_tokens=8)


def guided() -> None:
    answer = client.chat.completions.create(**SHORT, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    need(answer.choices[0].message.content in ("yes", "no"), "another text")
    older = client.chat.completions.create(**SHORT, extra_body={"guided_regex": "[0-9]{3}"})
    need(older.choices[0].message.content.isdecimal(), "another text")


def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24)
    need(answer.output_text, "no text")
    stream = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24, stream=True)
    events = [event.type for event in stream]
    need(events[0] == "response.created" and events[-1] in ("response.completed", "response.incomplete"), "no end")


def responses_form() -> None:
    form: Any = {"type": "json_schema", "name": "pet", "schema": PET, "strict": True}
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=200, text={"format": form})
    need(is_pet(answer.output_text), "not of the form")


def responses_tool() -> None:
    asked: Any = {"model": MODEL, "tools": [FLAT], "max_output_tokens": 200}
    answer = client.responses.create(**asked, input=QUESTION, tool_choice="required")
    call = next(item for item in answer.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(**asked, input=[*ASKED, *answer.output, result])


def responses_memory() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16, store=True)
    client.responses.create(model=MODEL, input="And 7 * 8?", previous_response_id=first.id, max_output_tokens=16)


def models() -> None:
    listed = {model.id for model in client.models.list()}
    need(MODEL in listed and client.models.retrieve(MODEL).id == MODEL, "the model is not listed")


def errors() -> None:
    refused(lambda: client.chat.completions.create(**SHORT | {"model": "gpt-9"}), "NotFoundError", "gpt-9")
    refused(lambda: client.completions.create(model=MODEL, prompt="x" * 200_000, max_tokens=4), "BadRequestError")


def image() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    client.chat.completions.create(**SHORT | {"messages": [{"role": "user", "content": [part]}]})


def embeddings() -> None:
    client.embeddings.create(model=MODEL, input="x")


run(
    chat=chat,
    stream=stream,
    logprobs=logprobs,
    n=several,
    seed=seed,
    json_object=json_object,
    json_schema=json_schema,
    parse=parse,
    forced_tool=forced_tool,
    tool_loop=tool_loop,
    streamed_tool=streamed_tool,
    one_call=one_call,
    form_and_tools=form_and_tools,
    custom_tool=custom_tool,
    allowed_tools=allowed_tools,
    completions=completions,
    scores=scores,
    fill_in=fill_in,
    guided=guided,
    responses=responses,
    responses_form=responses_form,
    responses_tool=responses_tool,
    responses_memory=responses_memory,
    models=models,
    errors=errors,
    image=image,
    embeddings=embeddings,
)
