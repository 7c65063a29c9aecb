"""LangChain's ChatOllama."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, QUESTION, URL, need, run
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

chat = ChatOllama(model=MODEL, base_url=URL, num_predict=24)
long = ChatOllama(model=MODEL, base_url=URL, num_predict=200)


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


def json_schema() -> None:
    need(isinstance(long.with_structured_output(Pet, method="json_schema").invoke("A cat."), Pet), "no Pet")


def tools() -> None:
    need(chat.bind_tools([weather]).invoke(QUESTION), "no answer")


def reasoning() -> None:
    need(ChatOllama(model=MODEL, base_url=URL, num_predict=24, reasoning=True).invoke(QUESTION), "no answer")


def validated() -> None:
    checked = ChatOllama(model=MODEL, base_url=URL, num_predict=8, validate_model_on_init=True)
    need(checked.invoke(QUESTION), "no answer")


def text() -> None:
    need(OllamaLLM(model=MODEL, base_url=URL, num_predict=8).invoke("def add(a, b):"), "no text")


def embeddings() -> None:
    OllamaEmbeddings(model=MODEL, base_url=URL).embed_query("x")


run(
    invoke=invoke,
    stream=stream,
    json_schema=json_schema,
    tools=tools,
    reasoning=reasoning,
    validated=validated,
    generate=text,
    embeddings=embeddings,
)
