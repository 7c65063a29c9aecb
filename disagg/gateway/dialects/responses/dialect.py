"""OpenAI's POST /v1/responses, as far as it needs no memory of earlier requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_TOOLS
from disagg.errors import RequestError
from disagg.gateway.dialects.base import Head, read_fields
from disagg.gateway.dialects.form import ANY_OBJECT, form_of
from disagg.gateway.dialects.openai import common as openai
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.request import GatewayRequest
from disagg.gateway.dialects.responses.items import Items, messages
from disagg.gateway.dialects.responses.tools import Offer, Tool, function_name, offered
from disagg.gateway.dialects.responses.writer import ResponseWriter
from disagg.http.stream import EVENT_STREAM

_ELSEWHERE: Final = ("tools", "tool_choice", "parallel_tool_calls")
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    **{name: values for name, values in openai.UNSUPPORTED.items() if name not in _ELSEWHERE},
    # memory of earlier requests
    "previous_response_id": (),
    "conversation": (),
    "store": (False,),
    "background": (False,),
    "prompt": (),
    # names of other APIs
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "truncation": ("disabled",),
}
"""Fields that would change the answer and cannot be honoured, with the values besides null that change nothing."""
UNSUPPORTED_IN_TEXT: Final[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}
_REASONING: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"


class TextFormat(Contract, frozen=True):
    """type: text, json_object or json_schema."""

    type: str
    schema: Mapping[str, Any] | None = None


class TextConfig(Contract, frozen=True):
    """The form of the answer's text."""

    format: TextFormat | None = None


class Reasoning(Contract, frozen=True):
    """effort: a variable of the chat template."""

    effort: str | None = None


class ResponsesBody(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    include: tuple[str, ...] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class Responses:
    """The dialect of /v1/responses."""

    name: ClassVar = "responses"
    media_type: ClassVar = EVENT_STREAM
    keep_alive: ClassVar = openai.KEEP_ALIVE

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(ResponsesBody, body, UNSUPPORTED)
        include = fields.include or ()
        options = fields.options(fields.max_output_tokens)
        if _LOGPROBS in include:
            options["logprobs"] = fields.top_logprobs or 0
        elif fields.top_logprobs:
            raise RequestError(f"top_logprobs: needs {_LOGPROBS} in include")
        template = dict(fields.chat_template_kwargs or {})
        if fields.reasoning is not None and fields.reasoning.effort is not None:
            template["reasoning_effort"] = fields.reasoning.effort
        if template:
            options["chat_template_kwargs"] = template
        choice = fields.tool_choice
        offer = offered(() if choice == "none" else fields.tools or ())
        return GatewayRequest(
            model=fields.model,
            prompts=({"messages": messages(fields.instructions, fields.input)},),
            options=options | _form(fields, offer),
            stream=bool(fields.stream),
            seal_reasoning=_REASONING in include,
            called_as=offer.names,
            left_out=tuple(offer.left_out),
            echoed={"tools": body.get("tools") or [], "tool_choice": "auto" if choice is None else choice},
        )

    def writer(self, head: Head) -> ResponseWriter:
        return ResponseWriter(head)

    def error(self, problem: Problem) -> Mapping[str, Any]:
        return openai.error_body(problem)


def _form(fields: ResponsesBody, offer: Offer) -> dict[str, Any]:
    choice = fields.tool_choice
    if isinstance(choice, Mapping):
        choice = _named(choice, offer)
    try:
        text = read_fields(TextConfig, fields.text or {}, UNSUPPORTED_IN_TEXT)
    except RequestError as error:
        raise RequestError(f"text.{error.message}", error.hint) from None
    return form_of(offer.functions, choice, _schema(text.format), "text.format")


def _named(choice: Mapping[str, Any], offer: Offer) -> Mapping[str, Any]:
    """The choice of one tool as chats write it. Raises RequestError for a custom tool whose input has a grammar: the
    input of a forced one would be any text."""
    namespace = choice.get("namespace")
    name = function_name(str(choice.get("name")), namespace if isinstance(namespace, str) else None)
    called = offer.names.get(name)
    if name in offer.with_grammar:
        message = f"tool_choice: {name!r} cannot be forced, because the model is not held to the grammar of its input"
        raise RequestError(message, 'choose "auto"')
    kind = "function" if called is not None and called.kind == choice.get("type") else choice.get("type")
    return {"type": kind, "function": {"name": name}}


def _schema(form: TextFormat | None) -> Mapping[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.type != "json_schema" or not form.schema:
        raise RequestError("text.format: not text, json_object or a json_schema with a schema")
    return form.schema
