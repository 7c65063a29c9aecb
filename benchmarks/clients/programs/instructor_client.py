"""instructor, in its modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from checks import KEY, MODEL, V1, need, run
from openai import OpenAI
from pydantic import BaseModel


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    tame: bool


def mode(name: str) -> Any:
    def feature() -> None:
        client = instructor.from_openai(
            OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=getattr(instructor.Mode, name)
        )
        pet = client.chat.completions.create(
            model=MODEL,
            response_model=Pet,
            messages=[{"role": "user", "content": "A cat."}],
            max_tokens=200,
            max_retries=0,
            temperature=0,
        )
        need(isinstance(pet, Pet), "no Pet")

    return feature


def partial() -> None:
    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=instructor.Mode.TOOLS)
    parts = client.chat.completions.create_partial(
        model=MODEL, response_model=Pet, messages=[{"role": "user", "content": "A cat."}], max_tokens=200, temperature=0
    )
    need(list(parts)[-1].tame is not None, "no Pet")


run(
    tools=mode("TOOLS"),
    tools_strict=mode("TOOLS_STRICT"),
    json_schema=mode("JSON_SCHEMA"),
    partial=partial,
)
