"""LiteLLM's SDK: OpenAI's, Anthropic's and Ollama's API of the gateway."""

from __future__ import annotations

from typing import Any

import litellm
from checks import KEY, MODEL, PET, QUESTION, URL, V1, WEATHER, is_pet, need, refused, run

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SHORT: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": V1,
    "api_key": KEY,
    "messages": ASKED,
    "max_tokens": 24,
    "num_retries": 0,
}
LONG = SHORT | {"max_tokens": 200}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}


def chat() -> None:
    need(litellm.completion(**SHORT).choices[0].message.content, "no text")


def stream() -> None:
    parts = list(litellm.completion(**SHORT, stream=True, stream_options={"include_usage": True}))
    need(any(getattr(part, "usage", None) for part in parts), "no usage")


def form() -> None:
    need(is_pet(litellm.completion(**LONG, response_format=FORM).choices[0].message.content), "not of the form")


def forced_tool() -> None:
    answer = litellm.completion(**LONG, tools=[TOOL], tool_choice="required")
    need(answer.choices[0].message.tool_calls[0].function.name == "weather", "no call")


def streamed_tool() -> None:
    parts = list(litellm.completion(**LONG, tools=[TOOL], tool_choice="required", stream=True))
    whole = litellm.stream_chunk_builder(parts)
    need(whole.choices[0].message.tool_calls[0].function.name == "weather", "no call")


def one_call() -> None:
    need(litellm.completion(**SHORT, tools=[TOOL], parallel_tool_calls=False).choices, "no answer")


def text() -> None:
    asked = {name: value for name, value in SHORT.items() if name != "messages"}
    asked["model"] = f"text-completion-openai/{MODEL}"
    need(litellm.text_completion(**asked, prompt="def add(a, b):").choices[0].text, "no text")


def responses() -> None:
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=V1, api_key=KEY, input=QUESTION, max_output_tokens=24)
    need(answer.output, "no text")


def anthropic() -> None:
    answer = litellm.completion(**SHORT | {"model": f"anthropic/{MODEL}", "api_base": URL})
    need(answer.choices[0].message.content, "no text")


def ollama() -> None:
    answer = litellm.completion(**SHORT | {"model": f"ollama_chat/{MODEL}", "api_base": URL})
    need(answer.choices[0].message.content, "no text")


def vllm() -> None:
    choice = {"guided_choice": ["yes", "no"]}
    answer = litellm.completion(**SHORT | {"model": f"hosted_vllm/{MODEL}"}, extra_body=choice)
    need(answer.choices[0].message.content in ("yes", "no"), "another text")


def errors() -> None:
    refused(lambda: litellm.completion(**SHORT | {"model": "openai/gpt-9"}), "NotFoundError", "gpt-9")


def embeddings() -> None:
    litellm.embedding(model=f"openai/{MODEL}", api_base=V1, api_key=KEY, input=["x"])


run(
    chat=chat,
    stream=stream,
    json_schema=form,
    forced_tool=forced_tool,
    streamed_tool=streamed_tool,
    one_call=one_call,
    text_completion=text,
    responses=responses,
    anthropic_form=anthropic,
    ollama_form=ollama,
    vllm_choice=vllm,
    errors=errors,
    embeddings=embeddings,
)
