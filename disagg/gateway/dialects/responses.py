"""OpenAI's POST /v1/responses, as far as it needs no memory of earlier requests: how its body and items are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_MESSAGES, MAX_TOOLS
from disagg.errors import RequestError
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import COMMENT, REFUSED, Framing, GatewayRequest, Head, named_event, read_fields
from disagg.gateway.dialects.chat import CallBody, ContentPart, FunctionCall, call_of, text_of, verbosity
from disagg.gateway.dialects.form import ANY_OBJECT, form_of
from disagg.gateway.dialects.reasoning import ReasoningFields
from disagg.gateway.dialects.responses_writer import SEALED, Keep, ResponseWriter
from disagg.gateway.dialects.tools import INPUT, Offer, Tool, function_name, offered, told
from disagg.http.stream import EVENT_STREAM

_HONOURED: Final = (openai.OF_REASONING | {"tools", "tool_choice"}) - {"reasoning_effort"}
UNSUPPORTED: Final = {
    **{name: field for name, field in openai.UNSUPPORTED.items() if name not in _HONOURED},
    **REFUSED["responses"],
}
_REASONING: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_CALLS: Final = ("function_call", "custom_tool_call")
FOLLOWS: Final = "previous_response_id"
_REPEATED: Final = (FOLLOWS, "instructions", "user", "safety_identifier", "prompt_cache_key", "top_logprobs")
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text")


class Responses(openai.OpenAIDialect):
    """The dialect of /v1/responses."""

    name: ClassVar = "responses"
    framing: ClassVar = Framing(EVENT_STREAM, named_event, COMMENT)

    def __init__(self, keep: Keep | None = None) -> None:
        """keep: gets each complete response whose caller does not forbid it; the input of a request that follows one
        begins with its items. None: nothing is kept, and no request follows another."""
        self._keep = keep
        self._unsupported = {name: field for name, field in UNSUPPORTED.items() if keep is None or name != FOLLOWS}

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(ResponsesBody, body, self._unsupported)
        stored = self._keep is not None and fields.store is not False
        include = fields.include or ()
        options = fields.options(fields.max_output_tokens)
        if _LOGPROBS in include:
            options["logprobs"] = fields.top_logprobs or 0
        elif fields.top_logprobs:
            raise RequestError("top_logprobs: needs logprobs", f"send {_LOGPROBS} in include")
        options |= fields.template()
        choice, text = fields.tool_choice, read_fields(TextConfig, fields.text or {}, {}, "text.")
        offer = offered(() if choice == "none" else fields.tools or ())
        return GatewayRequest(
            model=fields.model,
            prompts=({"messages": messages(fields.instructions, fields.input)},),
            options=options | _form(fields, offer, text.format),
            stream=bool(fields.stream),
            longest=fields.max_output_tokens,
            seal_reasoning=_REASONING in include,
            called_as=offer.names,
            left_out=(*offer.left_out, *verbosity(text.verbosity, "text.verbosity")),
            echoed=_echoed(body, fields, text) | {"store": stored},
            items=items_of(body["input"]) if stored else (),
            keep_alive_s=fields.keep_alive_s,
        )

    def writer(self, head: Head) -> ResponseWriter:
        return ResponseWriter(head, self._keep if head.request.echoed["store"] else None)


class ResponsesBody(ReasoningFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: tuple[str, ...] | None = None
    top_logprobs: int | None = None
    metadata: Mapping[str, Any] | None = None
    store: bool | None = None


class TextConfig(Contract, frozen=True):
    """The form of the answer's text. verbosity: low, medium or high."""

    format: TextFormat | None = None
    verbosity: str | None = None


class TextFormat(Contract, frozen=True):
    """type: text, json_object or json_schema."""

    type: str
    schema: Mapping[str, Any] | None = None


def items_of(given: Any) -> Sequence[Any]:
    """The `input` of a body as items. Whether they are valid is found when the body is read."""
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    return given if isinstance(given, list) else ()


def _echoed(body: Mapping[str, Any], fields: ResponsesBody, text: TextConfig) -> dict[str, Any]:
    """What the response repeats of the body, as it was sent."""
    form = (fields.text or {}).get("format") or {"type": "text"}
    given = {name: body[name] for name in _REPEATED if body.get(name) is not None}
    return {
        **given,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "text": {"format": form} | ({"verbosity": text.verbosity} if text.verbosity else {}),
        "tools": body.get("tools") or [],
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
    }


def _form(fields: ResponsesBody, offer: Offer, form: TextFormat | None) -> dict[str, Any]:
    functions, choice = told(offer, fields.tool_choice)
    made, schema = fields.form, _schema(form)
    if made and schema is not None:
        raise RequestError("text.format: the answer has a form already, by another field", "leave out one of them")
    made = made if schema is None else {"json_schema": schema}
    return form_of(functions, choice, made, parallel=fields.parallel_tool_calls)


def _schema(form: TextFormat | None) -> Mapping[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.type != "json_schema" or not form.schema:
        raise RequestError("text.format: no such form", "send text, json_object, or json_schema with a schema")
    return form.schema


def messages(instructions: str | None, given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The messages as disagg's hosts take them. Raises RequestError for an item that is not supported.

    instructions and the system messages that follow are one message: some chat templates read only the first.
    """
    written: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*written, {"role": "user", "content": given}]
    names = {item.call_id: _name(item) for item in given if item.type in _CALLS}
    for index, item in enumerate(given):
        place = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(written, item, place)
            case "reasoning":
                if reasoning := _reasoning(item, place):
                    _answer(written, ("reasoning", "content", "tool_calls"))["reasoning"] = reasoning
            case "function_call":
                call = call_of(CallBody(FunctionCall(_name(item), item.arguments), item.call_id), place, "arguments")
                _answer(written, ()).setdefault("tool_calls", []).append(call)
            case "custom_tool_call":
                called = {"name": _name(item), "arguments": {INPUT: item.input}, "id": item.call_id}
                _answer(written, ()).setdefault("tool_calls", []).append(called)
            case "function_call_output" | "custom_tool_call_output":
                text = text_of(item.output, f"{place}.output", _TEXTS)
                result = {"role": "tool", "content": text, "tool_call_id": item.call_id}
                name = names.get(item.call_id)
                written.append(result | ({"name": name} if name else {}))
            case _:
                message = f"{place}.type: models here cannot read such an item (got {item.type!r})"
                raise RequestError(message, "leave it out, or send what it says as a message")
    return written


Content = str | tuple[ContentPart, ...]


class Item(Contract, frozen=True):
    """An item: a message, a reasoning, the call of a function or a custom tool, or its output. Without a type it is a
    message. namespace, input: of calls."""

    type: str = "message"
    role: Annotated[str, Meta(min_length=1, max_length=32)] = "user"
    content: Content | None = None
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: Content | None = None


Items = Annotated[tuple[Item, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]


def _name(item: Item) -> str:
    return function_name(item.name, item.namespace)


def _add_message(written: list[dict[str, Any]], item: Item, place: str) -> None:
    text = text_of(item.content, f"{place}.content", _TEXTS)
    role = "system" if item.role == "developer" else item.role
    if role == "assistant":
        _answer(written, ("content", "tool_calls"))["content"] = text
    elif role == "system" and len(written) == 1 and written[0]["role"] == "system":
        written[0] = {"role": "system", "content": f"{written[0]['content']}\n\n{text}"}
    else:
        written.append({"role": role, "content": text})


def _answer(written: list[dict[str, Any]], taken: Sequence[str]) -> dict[str, Any]:
    """The answer that an item belongs to: the last message, unless it is none or has one of the fields `taken`."""
    if not written or written[-1]["role"] != "assistant" or any(written[-1].get(name) for name in taken):
        written.append({"role": "assistant", "content": ""})
    return written[-1]


def _reasoning(item: Item, place: str) -> str:
    """The text of a reasoning; empty if only another server can read it."""
    if item.content:
        return text_of(item.content, f"{place}.content", _TEXTS)
    sealed = item.encrypted_content or ""
    return sealed.removeprefix(SEALED) if sealed.startswith(SEALED) else ""
