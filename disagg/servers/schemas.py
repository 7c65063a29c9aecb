"""Request bodies, validated once, here. A bad one is a RequestError of one line: field, reason, value."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from disagg.api.requests import Messages
from disagg.api.sampling import Sampling
from disagg.errors import RequestError

MAX_TOKENS = 1 << 20
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Message(_Body):
    role: Annotated[str, StringConstraints(min_length=1, max_length=32)]
    content: str


class SamplingBody(_Body):
    """How tokens are chosen; the same names and bounds as `disagg.engines.base.Sampling`."""

    max_tokens: int = Field(256, ge=1, le=MAX_TOKENS)
    temperature: float = Field(0.0, ge=0, le=10, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=1 << 20)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: list[StopString] = Field(default_factory=list, max_length=16)
    logprobs: int | None = Field(None, ge=0, le=20)
    ignore_eos: bool = False

    def sampling(self) -> Sampling:
        return Sampling(**{**self.model_dump(), "stop": tuple(self.stop)})


class PromptBody(_Body):
    """Exactly one of prompt, messages and tokens."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=4096)
    tokens: list[Token] | None = Field(None, max_length=MAX_TOKENS)
    deadline_s: float = Field(600.0, gt=0, le=86400)

    @model_validator(mode="after")
    def _one_prompt(self) -> PromptBody:
        if sum(value is not None for value in (self.prompt, self.messages, self.tokens)) != 1:
            raise ValueError("give exactly one of prompt, messages and tokens")
        return self

    @property
    def content(self) -> str | Messages | list[int]:
        """The prompt in whichever form it came."""
        if self.messages is not None:
            return [message.model_dump() for message in self.messages]
        return self.prompt if self.prompt is not None else self.tokens or []


class GenerateBody(PromptBody):
    """POST /generate: one request, alone on this host."""

    sampling: SamplingBody = SamplingBody()


class DecodeBody(GenerateBody):
    """POST /decode. `kv_failure`: what this host does when the KV does not arrive whole."""

    kv_failure: Literal["fail", "recompute"] = "fail"


class Delivery(_Body):
    """Where KV goes, as the decode host's slot event said."""

    host: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    port: int = Field(ge=1, le=65535)


class PrefillBody(PromptBody):
    """POST /prefill."""

    deliver: Delivery
    ticket: Annotated[str, StringConstraints(min_length=8, max_length=128)]


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], data: bytes) -> Body:
    """The validated body, or a RequestError naming the first bad field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise RequestError(_one_line(error), "see docs/http-api.md for the request bodies") from None


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"the request body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    place = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    value = repr(first.get("input"))
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"{place}: {reason} (got {shown})" if place else reason
