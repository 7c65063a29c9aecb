"""Outlines over OpenAI's API and over vLLM's."""

from __future__ import annotations

from typing import Any, Literal

import outlines
from checks import KEY, MODEL, QUESTION, V1, need, run
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
plain = outlines.from_openai(client, MODEL)
vllm = outlines.from_vllm(client, MODEL)


class Pet(BaseModel):
    model_config = {"extra": "forbid"}
    kind: Literal["cat", "dog"]
    tame: bool


def chat() -> None:
    need(plain(QUESTION, max_tokens=24), "no text")


def json_schema() -> None:
    Pet.model_validate_json(plain("A cat.", Pet, max_tokens=200))


def of_vllm(kind: Any, fits: Any) -> Any:
    def feature() -> None:
        need(fits(vllm("A cat.", kind, max_tokens=64)), "another form")

    return feature


run(
    chat=chat,
    json_schema=json_schema,
    vllm_json=of_vllm(Pet, Pet.model_validate_json),
    vllm_choice=of_vllm(Literal["yes", "no"], lambda text: text in ("yes", "no")),
    vllm_regex=of_vllm(Regex("[0-9]{3}"), str.isdecimal),
    vllm_grammar=of_vllm(CFG('start: "yes" | "no"'), lambda text: text in ("yes", "no")),
)
