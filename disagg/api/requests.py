"""The bodies of POST /generate, POST /decode and POST /prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, field

from disagg.api.base import Contract
from disagg.api.sampling import MAX_TOKENS, Sampling

MAX_MESSAGES = 4096
MAX_DEADLINE_S = 86400.0
DEFAULT_DEADLINE_S = 600.0

Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Messages = Sequence[Mapping[str, str]]


class ChatMessage(Contract, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. The model's chat template decides which roles it takes."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str


class KVAddress(Contract, frozen=True, forbid_unknown_fields=True):
    """The address at which a decode host receives KV."""

    host: Annotated[str, Meta(min_length=1, max_length=253)]
    port: Port


class PromptBody(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all requests have: the model, exactly one of prompt, messages and tokens, and the seconds until the request
    must have ended."""

    model: str
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_MESSAGES)] | None = None
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_TOKENS)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] = DEFAULT_DEADLINE_S

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.prompt, self.messages, self.tokens)) != 1:
            raise ValueError("give exactly one of prompt, messages and tokens")

    @property
    def content(self) -> str | Messages | Sequence[int]:
        """The prompt in whichever form it was given."""
        if self.messages is not None:
            return [{"role": message.role, "content": message.content} for message in self.messages]
        return self.prompt if self.prompt is not None else self.tokens or ()


class GenerateBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /generate: prompt and answer on this host alone."""

    sampling: Sampling = field(default_factory=Sampling)


class DecodeBody(GenerateBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /decode. `kv_failure`: what the decode host does if the KV does not arrive whole."""

    kv_failure: Literal["fail", "recompute"] = "fail"


class PrefillBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /prefill. `deliver` and `ticket`: as the decode host's slot event stated them."""

    deliver: KVAddress
    ticket: Annotated[str, Meta(min_length=8, max_length=128)]
