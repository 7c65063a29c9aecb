"""A request of ours as one of OpenAI's API: the path below the host's URL, and the JSON body. Pure.

It goes to a whole-request host: a server of another program, which computes prompt and answer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from disagg.api.requests import ChatMessage, GenerateBody, ToolCall
from disagg.api.sampling import Sampling
from disagg.errors import CapabilityMissing

CHAT: Final = "/chat/completions"
COMPLETIONS: Final = "/completions"
MODELS: Final = "/models"

_DEFAULTS: Final = Sampling()
_UNLESS_DEFAULT: Final = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
"""top_k, min_p, repetition_penalty and ignore_eos are not OpenAI's: only some servers take them."""
_UNKNOWN_THERE: Final = {
    "stop_token_ids": "send their texts as stop",
    "include_stop_str_in_output": "add the text of stop yourself",
    "min_tokens": "leave it out",
    "bad_words": "leave it out",
}
"""What OpenAI's API has not, with what to do: a server that does not know it would leave it out."""
BYTES_PER_TOKEN: Final = 3
"""A low guess, for a prompt that is counted elsewhere."""
SMALL: Final = 16
"""A bound is small up to this part of the context."""
_ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A POST to a whole-request host. path: below its URL."""

    path: str
    body: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self.body)


def openai_request(body: GenerateBody, model: str, context: int) -> OpenAIRequest:
    """The request of OpenAI's API for one of ours. model: its name on that host. context: the model's, in tokens.

    Raises CapabilityMissing for what OpenAI's API cannot state. cache_salt and hold_prompt are not passed on.
    """
    for name, hint in _UNKNOWN_THERE.items():
        if getattr(body.sampling, name) != getattr(_DEFAULTS, name):
            raise CapabilityMissing(f"{name}: a whole-request host has OpenAI's API, which does not know it", hint)
    if body.ending != "begun":
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise CapabilityMissing(f"{name}: a whole-request host begins a message of its own", "leave it out")
    if body.tokens is not None or body.answer_tokens:
        raise CapabilityMissing("a whole-request host takes text, not token ids", "send a prompt or messages")
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **_sampling(body, context)}
    if body.messages is None:
        if body.sampling.logprobs is not None:
            common["logprobs"] = body.sampling.logprobs
        gap = {"suffix": body.suffix} if body.suffix else {}
        return OpenAIRequest(COMPLETIONS, {**common, "prompt": body.prompt, **gap, **_schema(body)})
    if body.sampling.logprobs is not None:
        common |= {"logprobs": True, "top_logprobs": body.sampling.logprobs}
    messages = [_message(message) for message in body.messages]
    return OpenAIRequest(CHAT, {**common, "messages": messages, **_schema(body), **_tools(body), **_template(body)})


def _sampling(body: GenerateBody, context: int) -> dict[str, Any]:
    sampling = body.sampling
    fields: dict[str, Any] = {"temperature": sampling.temperature, **_longest(body, context)}
    given = {name: getattr(sampling, name) for name in _UNLESS_DEFAULT}
    fields |= {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return fields


def _longest(body: GenerateBody, context: int) -> dict[str, Any]:
    """The bound of the answer. With fit_context what the context leaves; if that is unknown, a small bound stays and a
    large one is not sent: many servers refuse one that does not fit."""
    longest = body.sampling.max_tokens
    if not body.sampling.fit_context:
        return {"max_tokens": longest}
    room = context - len(msgspec.json.encode((body.prompt, body.messages, body.tools))) // BYTES_PER_TOKEN
    if room > 0:
        return {"max_tokens": min(longest, room)}
    return {"max_tokens": longest} if longest <= context // SMALL else {}


def _schema(body: GenerateBody) -> dict[str, Any]:
    if body.form is not None and body.json_schema is None:
        field = body.form[0]
        raise CapabilityMissing(
            f"{field}: OpenAI's API, which a whole-request host has, knows no such form", "use json_schema"
        )
    if body.json_schema is None:
        return {}
    if body.json_schema == _ANY_OBJECT:
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": body.json_schema, "strict": _closed(body.json_schema)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _closed(schema: Any) -> bool:
    """Whether OpenAI takes the schema as a strict one: each object states all its fields and requires them."""
    if isinstance(schema, list):
        return all(map(_closed, schema))
    if not isinstance(schema, Mapping):
        return True
    fields = schema.get("properties", {})
    if schema.get("type") == "object" or fields:
        required = schema.get("required", ())
        if schema.get("additionalProperties") is not False or any(name not in required for name in fields):
            return False
    return all(map(_closed, schema.values()))


def _tools(body: GenerateBody) -> dict[str, Any]:
    if not body.tools:
        return {}
    fields: dict[str, Any] = {"tools": [tool.for_template() for tool in body.tools]}
    if body.must_call or not body.parallel_tool_calls:
        fields["parallel_tool_calls"] = False  # a forced answer is one call, as on a decode host
    if len(body.must_call) == 1:
        fields["tool_choice"] = {"type": "function", "function": {"name": body.must_call[0]}}
    elif body.must_call and set(body.must_call) == {tool.name for tool in body.tools}:
        fields["tool_choice"] = "required"
    elif body.must_call:
        raise CapabilityMissing("a whole-request host can be made to call one tool or any, not one of several")
    return fields


def _template(body: GenerateBody) -> dict[str, Any]:
    """chat_template_kwargs as vLLM, SGLang and llama.cpp take them; reasoning_effort is a field of OpenAI's."""
    variables = dict(body.chat_template_kwargs)
    effort = variables.pop("reasoning_effort", None)
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return {**fields, "chat_template_kwargs": variables} if variables else fields


def _message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = list(_calls(message.tool_calls))
    given = {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields | {name: value for name, value in given.items() if value}


def _calls(calls: tuple[ToolCall, ...]) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(calls):
        arguments = msgspec.json.encode(call.arguments).decode()
        function = {"name": call.name, "arguments": arguments}
        yield {"type": "function", "id": call.id or f"call_{number}", "function": function}
