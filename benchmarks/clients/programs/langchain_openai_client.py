"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any, Literal

from checks import KEY, MODEL, QUESTION, V1, need, run
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

GATEWAY: dict[str, Any] = {"model": MODEL, "base_url": V1, "api_key": KEY, "max_retries": 0}
chat = ChatOpenAI(**GATEWAY, max_tokens=24)
long = ChatOpenAI(**GATEWAY, max_tokens=200, temperature=0)


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    tame: bool


@tool
def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def invoke() -> None:
    answer = chat.invoke(QUESTION)
    need(answer.content and answer.usage_metadata, "no text or no usage")


def stream() -> None:
    need(len(list(chat.stream(QUESTION))) > 4, "no pieces")


def batch() -> None:
    need(len(chat.batch([QUESTION] * 3)) == 3, "no three answers")


def logprobs() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    need(answer.response_metadata["logprobs"], "no log-probabilities")


def structured(method: str) -> Any:
    def features() -> None:
        need(isinstance(long.with_structured_output(Pet, method=method).invoke("A cat."), Pet), "no Pet")

    return features


def json_mode() -> None:
    found = long.with_structured_output(Pet, method="json_mode", include_raw=True).invoke("A cat as JSON.")
    need(found["raw"].content.lstrip().startswith("{"), "no object")


def forced_tool() -> None:
    answer = long.bind_tools([weather], tool_choice="any").invoke(QUESTION)
    need(answer.tool_calls[0]["name"] == "weather", "no call")


def form_with_tools() -> None:
    answer = long.bind_tools([weather], response_format=Pet, strict=True, parallel_tool_calls=False).invoke(QUESTION)
    need(answer.tool_calls or answer.additional_kwargs.get("parsed") or answer.content, "neither a call nor the form")


def agent() -> None:
    found = create_agent(chat, [weather]).invoke({"messages": [{"role": "user", "content": QUESTION}]})
    need(found["messages"][-1].content, "no answer")


def agent_form() -> None:
    agent = create_agent(long, [weather], response_format=Pet)
    found = agent.invoke({"messages": [{"role": "user", "content": "A cat."}]})
    need(isinstance(found["structured_response"], Pet), "no Pet")


def responses() -> None:
    need(ChatOpenAI(**GATEWAY, max_tokens=24, use_responses_api=True).invoke(QUESTION).content, "no text")


def text() -> None:
    need(OpenAI(**GATEWAY, max_tokens=8).invoke("def add(a, b):"), "no text")


def embeddings() -> None:
    OpenAIEmbeddings(**GATEWAY, check_embedding_ctx_length=False).embed_query("x")


run(
    invoke=invoke,
    stream=stream,
    batch=batch,
    logprobs=logprobs,
    json_schema=structured("json_schema"),
    function_calling=structured("function_calling"),
    json_mode=json_mode,
    forced_tool=forced_tool,
    form_with_tools=form_with_tools,
    agent=agent,
    agent_form=agent_form,
    responses=responses,
    completions=text,
    embeddings=embeddings,
)
