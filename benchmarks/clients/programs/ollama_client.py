"""Ollama's Python client."""

from __future__ import annotations

from typing import Any

from checks import MODEL, PET, QUESTION, URL, WEATHER, is_pet, need, refused, run
from ollama import Client

client = Client(host=URL)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SHORT: dict[str, Any] = {"model": MODEL, "messages": ASKED, "options": {"num_predict": 24}}
LONG = SHORT | {"options": {"num_predict": 200}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}


def chat() -> None:
    answer = client.chat(**SHORT)
    need(answer.message.content and answer.eval_count and answer.done_reason, "no text or no figures")


def stream() -> None:
    parts = list(client.chat(**SHORT, stream=True))
    need(len(parts) > 4 and parts[-1].done, "no end")


def generate() -> None:
    need(client.generate(model=MODEL, prompt=QUESTION, options={"num_predict": 8}).response, "no text")


def form() -> None:
    need(is_pet(client.chat(**LONG, format=PET).message.content), "not of the form")
    client.chat(**LONG, format="json")


def tools() -> None:
    need(client.chat(**SHORT, tools=[TOOL]).done, "no answer")


def form_and_tools() -> None:
    answer = client.chat(**LONG, tools=[TOOL], format=PET)
    called = answer.message.tool_calls or answer.done_reason == "length"  # this model calls until it is cut
    need(called or is_pet(answer.message.content), "neither a call nor the form")


def logprobs() -> None:
    need(client.chat(**SHORT, logprobs=True, top_logprobs=2).logprobs, "no log-probabilities")


def think() -> None:
    need(client.chat(**SHORT, think=False).done, "no answer")


def fill_in() -> None:
    client.generate(model=MODEL, prompt="def add(a, b):\n", suffix="\nprint(add(1, 2))", options={"num_predict": 8})


def listed() -> None:
    models = {model.model: model.digest for model in client.list().models}
    need(MODEL in models and all(models.values()), "the model or its digest is not listed")
    need("completion" in (client.show(MODEL).capabilities or ()), "no capabilities")
    client.ps()


def keep_alive() -> None:
    for length in ("5m", -1):
        need(client.chat(**SHORT | {"keep_alive": length}).done, f"no answer with keep_alive {length}")
    need(client.generate(model=MODEL).done_reason == "load", "not loaded")
    refused(lambda: client.chat(**SHORT | {"keep_alive": "soon"}), "ResponseError", "keep_alive")


def latest() -> None:
    need(client.chat(**SHORT | {"model": f"{MODEL}:latest"}).done, "no answer")


def errors() -> None:
    refused(lambda: client.chat(**SHORT | {"model": "llama-9"}), "ResponseError", "llama-9", "404")


def image() -> None:
    client.chat(**SHORT | {"messages": [{"role": "user", "content": "x", "images": [b"x"]}]})


def embed() -> None:
    client.embed(model=MODEL, input="x")


def pull() -> None:
    client.pull("qwen3:8b")


run(
    chat=chat,
    stream=stream,
    generate=generate,
    form=form,
    tools=tools,
    form_and_tools=form_and_tools,
    logprobs=logprobs,
    think=think,
    fill_in=fill_in,
    list_show_ps=listed,
    keep_alive=keep_alive,
    latest=latest,
    errors=errors,
    image=image,
    embed=embed,
    pull=pull,
)
