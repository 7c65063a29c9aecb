"""The bodies of POST /generate, POST /decode, POST /prefill, POST /score and POST /lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, field

from disagg.api.base import Contract, Count
from disagg.api.layout import MAX_LAYERS
from disagg.api.names import KV_CHUNKS, KV_WHOLE, SplitWord, WireForm
from disagg.api.sampling import MAX_TOKENS, MAX_TOP, Sampling

MAX_MESSAGES = 4096
MAX_DEADLINE_S = 86400.0
DEFAULT_DEADLINE_S = 600.0
MAX_LEASE_S = 600.0
MAX_LEASES = 4096  # request ids in one POST /lease
MAX_TOOLS = 128
MAX_CALLS = 128  # tool calls of one message
MAX_SCHEMA_BYTES = 1 << 16
MAX_CHOICE: Final = 4096
FORMS: Final = ("json_schema", "regex", "choice", "grammar")
"""The fields of GenerateBody that give an answer a form."""
MAX_SCORES: Final = 1 << 19
"""Log-probabilities of prompts that the answer to a request lists."""
MAX_ANSWERS: Final = 512
"""Answers that a gateway computes at a time."""
MAX_WEIGHT: Final = 100
MIN_BODY_LIMIT: Final = 1 << 20
BODY_BYTES_PER_TOKEN: Final = 64  # of context: several times what any tokenizer's average token takes, also as JSON

Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64)]
Port = Annotated[int, Meta(ge=1, le=65535)]
ToolName = Annotated[str, Meta(min_length=1, max_length=128)]
FormText = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Ending = Literal["begun", "within", "closed"]
"""How the prompt of a chat ends: with the beginning of an answer, within the last message, or after it."""
Messages = Sequence[Mapping[str, Any]]
Weight = Annotated[int, Meta(ge=1, le=MAX_WEIGHT)]
PerMinute = Annotated[int, Meta(ge=1)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
"""The first so many layers of a model."""
KVVersion = Annotated[int, Meta(ge=KV_WHOLE, le=KV_CHUNKS)]
NewestKV = Annotated[int, Meta(ge=KV_WHOLE, le=1 << 16)]
"""The latest version of the KV protocol that a host knows, which may be later than what this one knows."""
Split = SplitWord | Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
"""How many of a model's layers a prefill host computes of a prompt: "auto": as many as take the least time; "off": all
or none. 0: none; a number that the model has not: all."""
Parallel = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]


def body_limit(context: int) -> int:
    """The largest body of a request, in bytes. context: tokens of the largest prompt."""
    return max(MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN * context)


class ToolCall(Contract, frozen=True, forbid_unknown_fields=True):
    """A call of a tool that the model wants. id: names the call in the message with its result."""

    name: ToolName
    arguments: Mapping[str, Any] = {}
    id: Annotated[str, Meta(max_length=128)] = ""

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.arguments}}


class Tool(Contract, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: ToolName
    description: str = ""
    parameters: Mapping[str, Any] = {}

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates and mlx-lm's parsers read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ChatMessage(Contract, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. The model's chat template decides which roles it takes. reasoning, tool_calls: of an
    earlier answer. tool_call_id, name: the call that this message of the role tool is the result of, and its tool."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str = ""
    reasoning: str = ""
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_CALLS)] = ()
    tool_call_id: Annotated[str, Meta(max_length=128)] = ""
    name: Annotated[str, Meta(max_length=128)] = ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: without what is empty, reasoning under each of its usual names."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        given = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {name: value for name, value in given.items() if value}


class KVAddress(Contract, frozen=True, forbid_unknown_fields=True):
    """The address at which a decode host receives KV."""

    host: Annotated[str, Meta(min_length=1, max_length=253)]
    port: Port


class Share(Contract, frozen=True, forbid_unknown_fields=True):
    """Whose share of a host a request counts for, see disagg/shares.py. key: the id of a gateway's key; all requests
    without one count as one key. weight: a key of weight 2 has twice the share of one of weight 1."""

    key: Annotated[str, Meta(max_length=128)] = ""
    weight: Weight = 1


class PromptBody(Contract, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What all requests have: the model, and exactly one of prompt, messages and tokens.

    answer_tokens: the answer's first tokens, if a host that failed has generated them: the request goes on after them.
    deadline_s: seconds until the request must have ended. lease_s: seconds after which it ends unless POST /lease names
    it; None: it lasts as long as its connection. cache_salt: only requests with the same salt share held KV. share:
    whose share of the host the request counts for. standing: what its caller knows of it. "suspect": a host's process
    has ended while it ran, so it may be what ends hosts; "innocent": hosts stated that of it, and its caller has
    weighed it; see disagg/strikes.py. tools, chat_template_kwargs: what the chat template gets beside the messages.
    add_generation_prompt: the prompt of a chat ends with the beginning of an answer. continue_final_message: it ends
    within the last message, the assistant's, which the answer goes on with. suffix: the text that follows the gap after
    the prompt, which the answer fills.
    """

    more_schema: ClassVar[Mapping[str, Any]] = {
        "oneOf": [
            {"required": [name], "properties": {name: {"type": kind}}}
            for name, kind in (("prompt", "string"), ("messages", "array"), ("tokens", "array"))
        ]
    }
    model: str
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_MESSAGES)] | None = None
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_TOKENS)] | None = None
    answer_tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_TOKENS)] = ()
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] = DEFAULT_DEADLINE_S
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] = ""
    share: Share = Share()
    standing: Literal["", "suspect", "innocent"] = ""
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] = ()
    chat_template_kwargs: Annotated[Mapping[str, Any], Meta(max_length=64)] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    suffix: str = ""

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.prompt, self.messages, self.tokens)) != 1:
            raise ValueError("give exactly one of prompt, messages and tokens")
        if self.suffix and self.prompt is None:
            raise ValueError("suffix: it follows a prompt of text, and there is none")
        last = self.messages[-1] if self.messages else None
        if self.continue_final_message and (last is None or last.role != "assistant" or not last.content):
            raise ValueError("continue_final_message: the last message is none of the assistant's with a content")
        if self.continue_final_message and last is not None and last.tool_calls:
            raise ValueError("continue_final_message: the last message has tool calls, after which nothing follows")

    @property
    def of_prompt(self) -> dict[str, Any]:
        """The fields that every request with this prompt has."""
        return {name: getattr(self, name) for name in PromptBody.__struct_fields__}

    @property
    def ending(self) -> Ending:
        """How the prompt of a chat ends."""
        return "within" if self.continue_final_message else "begun" if self.add_generation_prompt else "closed"

    @property
    def content(self) -> str | Messages | Sequence[int]:
        """The prompt in whichever form it was given."""
        if self.messages is not None:
            return [message.for_template() for message in self.messages]
        return self.prompt if self.prompt is not None else self.tokens or ()

    @property
    def template(self) -> Mapping[str, Any]:
        """The variables of the chat template beside the messages."""
        tools = {"tools": [tool.for_template() for tool in self.tools]} if self.tools else {}
        return {**self.chat_template_kwargs, **tools}


class CountBody(PromptBody, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """POST /count. list_tokens: the answer names the tokens, too."""

    list_tokens: bool = False


class GenerateBody(PromptBody, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """POST /generate: prompt and answer on this host alone.

    must_call: the answer is a call of one of these tools; empty: the model decides. parallel_tool_calls: False: the
    answer ends after its first call. json_schema: the answer is JSON that fits this schema. regex: the whole answer
    matches this expression. choice: it is one of these texts. grammar: it fits this grammar, whose first rule is
    `start` in Lark's notation and `root` in GBNF. With one of these and tools, the answer has the form or is a call.
    hold_prompt: keep the prompt's KV from the first token on, as more answers to it follow; KV that this host has
    computed itself is kept only when the answer ends. split: the layers that a prefill host computes; "auto": what the
    decode host's own setting says.

    Fields with their default value are left out, so that hosts which do not know them take the others.
    """

    sampling: Sampling = field(default_factory=Sampling)
    must_call: Annotated[tuple[ToolName, ...], Meta(max_length=MAX_TOOLS)] = ()
    parallel_tool_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    regex: FormText | None = None
    choice: Annotated[tuple[FormText, ...], Meta(min_length=1, max_length=MAX_CHOICE)] | None = None
    grammar: FormText | None = None
    hold_prompt: bool = False
    split: Split = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: the answer has a form already, by {given[0]}")
        if self.form is not None and len(msgspec.json.encode(self.form[1])) > MAX_SCHEMA_BYTES:
            raise ValueError(f"{given[0]}: over {MAX_SCHEMA_BYTES} bytes")
        if given and self.must_call:
            raise ValueError(f"{given[0]}: the answer is a tool call already, by must_call")
        if self.continue_final_message and self.must_call:
            raise ValueError("must_call: the answer goes on with a text, by continue_final_message")
        schemas = [tool.parameters for tool in self.tools_of_form]
        if schemas and sum(len(msgspec.json.encode(schema)) for schema in schemas) > MAX_SCHEMA_BYTES:
            field = "must_call: the parameters of its tools" if self.must_call else "tools: their parameters"
            raise ValueError(f"{field} are over {MAX_SCHEMA_BYTES} bytes")
        if unknown := set(self.must_call) - {tool.name for tool in self.tools}:
            raise ValueError(f"must_call: there is no tool {min(unknown)!r}")

    @property
    def form(self) -> tuple[str, Any] | None:
        """The field that gives the answer a form, and its value; None if none does."""
        return next(((name, value) for name in FORMS if (value := getattr(self, name)) is not None), None)

    @property
    def tools_of_form(self) -> Sequence[Tool]:
        """The tools whose calls are part of the form that the answer must have."""
        return self.tools if self.form is not None else [tool for tool in self.tools if tool.name in self.must_call]


class ScoreBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /score. top: the likeliest alternatives to report per token."""

    top: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer_tokens:
            raise ValueError("answer_tokens: a prompt is scored, not an answer")


class PromptSpeed(Contract, frozen=True):
    """How fast a prefill host has computed a prompt of so many tokens, lately: in tokens/s of all layers."""

    tokens: Count
    tokens_s: Annotated[float, Meta(gt=0, le=1e9)]


PromptSpeeds = Annotated[tuple[PromptSpeed, ...], Meta(max_length=64)]


class PrefillOffer(Contract, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The prefill host that the caller would ask: the decode host compares it with itself. wait_s: expected wait in its
    queue. tokens_s: measured prefill speed, of all layers; None: not measured. speeds: that of prompts of different
    lengths. link_bytes_s: measured rate of the link between the two hosts, None if unknown. splits: it can compute a
    model's first layers only. layers: it has no more than these, None if it has all. kv_version: the latest version of
    the KV protocol that it sends. alone: the decode host may compute all of the prompt itself."""

    wait_s: Annotated[float, Meta(ge=0, le=MAX_DEADLINE_S)] = 0.0
    tokens_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    link_bytes_s: Annotated[float, Meta(gt=0, le=1e13)] | None = None
    splits: bool = False
    layers: Layers | None = None
    kv_version: NewestKV = KV_WHOLE
    alone: bool = True
    speeds: PromptSpeeds = ()

    def speed(self, tokens: int) -> float | None:
        """The speed for a prompt of so many tokens: that of the most alike one, in powers of two; `tokens_s` if none is
        stated."""
        alike = min(self.speeds, key=lambda one: abs(log2(one.tokens + 1) - log2(tokens + 1)), default=None)
        return self.tokens_s if alike is None else alike.tokens_s


class DecodeBody(GenerateBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /decode. `prefill`: the prefill host that the caller would ask; None: the decode host waits for KV however
    short the rest of the prompt is, if there is any. elsewhere_s: seconds in which another prefill host is expected to
    deliver the KV, None if there is none that could go on for it: a sender that sends next to nothing is waited for
    as long. audit: the KV is audited even if the host audits one hand-off in several, since its sender's was refuted
    before. sender: the name of the prefill host that the caller asks for the KV: what is found counts for it,
    whatever the KV states."""

    prefill: PrefillOffer | None = None
    audit: bool = False
    sender: Annotated[str, Meta(max_length=256)] = ""
    elsewhere_s: Annotated[float, Meta(ge=0, le=MAX_DEADLINE_S)] | None = None


class PrefillBody(PromptBody, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """POST /prefill. `deliver` and `ticket`: as the decode host's slot event stated them. `start`: its `held_tokens`,
    the first token whose KV is sent. `layers`, `kv_version`, `kv_wire`: the slot's, too. Fields with their default
    value are left out, as of GenerateBody."""

    deliver: KVAddress
    ticket: Annotated[str, Meta(min_length=8, max_length=128)]
    start: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    layers: Layers | None = None
    kv_version: KVVersion = KV_WHOLE
    kv_wire: WireForm | None = None


class LeaseBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /lease: extend the leases of these requests by their own `lease_s`, from now on."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_LEASES)]
