"""Anthropic's POST /v1/messages, and POST /v1/messages/count_tokens, whose body is the same without max_tokens.

A message is a list of blocks, of which one may hold what others write as several messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_MESSAGES, MAX_TOOLS
from disagg.errors import RequestError
from disagg.gateway.dialects.anthropic_writer import AnthropicWriter, error_body
from disagg.gateway.dialects.base import (
    REFUSED,
    CountedPrompt,
    Framing,
    GatewayRequest,
    Head,
    Written,
    answer_length,
    named_event,
    read_fields,
    thinking,
)
from disagg.gateway.dialects.form import FunctionBody, form_of
from disagg.gateway.dialects.problems import Problem
from disagg.http.stream import EVENT_STREAM

UNSUPPORTED: Final = REFUSED["anthropic"]
_OF_ANTHROPIC: Final = re.compile(
    r"(web_search|web_fetch|code_execution|bash|text_editor|computer|memory|mcp_toolset|tool_search_tool(_\w+)?)(_\d{8})?"
)
"""Types of tools that run at Anthropic, or that only its models can call. They are left out of the prompt, and the
answer is one that a caller must expect anyway: no tool has to be called."""
_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Efforts that chat templates do not have."""
BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code's first system block. It holds a number that changes with every request, so that no prompt would begin
like the last one and no KV could be reused; it says nothing to a model."""


class Messages:
    """The dialect of /v1/messages."""

    name: ClassVar = "messages"
    framing: ClassVar = Framing(EVENT_STREAM, named_event, named_event({"type": "ping"}))

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(MessagesBody, body, UNSUPPORTED)
        given = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k}
        options = {
            "temperature": 1.0,
            **{name: value for name, value in given.items() if value is not None},
            **answer_length(fields.max_tokens),
            **fields.options(),
        }
        if fields.stop_sequences:
            options["stop"] = fields.stop_sequences
        return fields.request(options=options, stream=bool(fields.stream), longest=fields.max_tokens)

    def writer(self, head: Head) -> AnthropicWriter:
        return AnthropicWriter(head)

    def error(self, problem: Problem) -> Mapping[str, Any]:
        return error_body(problem)


class CountTokens(Messages):
    """What /v1/messages/count_tokens counts: the prompt that these messages make."""

    name: ClassVar = "count_tokens"
    lists_tokens: ClassVar = False

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(CountBody, body, UNSUPPORTED)
        return fields.request(options=fields.options())

    def counted(self, counted: CountedPrompt) -> Written:
        return {"input_tokens": counted.prompt_tokens}


class CountBody(Contract, frozen=True, kw_only=True):
    """The fields of /v1/messages/count_tokens that the gateway honours."""

    model: str
    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | tuple[Block, ...] | None = None
    tools: Annotated[tuple[dict[str, Any], ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the caller wants the model's reasoning. It must ask for it: many callers read the first block as the
        answer."""
        given = self.thinking
        return given is not None and given.type != "disabled" and given.display != "omitted"

    def options(self) -> dict[str, Any]:
        """The options of AsyncClient.stream that the prompt and the form of the answer depend on."""
        template = thinking(self.thinking is not None and self.thinking.type != "disabled")
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            template["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
        field, form = "output_config.format", config.format
        if form is None and self.output_format is not None:
            field, form = "output_format", self.output_format
        choice = _choice(self.tool_choice)
        tools = [] if choice == "none" else _offered(self.tools or ())[0]
        one_call = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        schema = _schema(form, field)
        made = form_of(tools, choice, {} if schema is None else {"json_schema": schema}, parallel=not one_call)
        return {"chat_template_kwargs": template, **made, **self._ending(made)}

    def _ending(self, made: Mapping[str, Any]) -> dict[str, bool]:
        """A last message of the assistant is the beginning of the answer."""
        if self.messages[-1].role != "assistant":
            return {}
        if "must_call" in made:
            raise RequestError("tool_choice: the last message begins the answer, so that it is no call", "send auto")
        return {"continue_final_message": True}

    def request(self, **fields: Any) -> GatewayRequest:
        """The request for the answer to these messages."""
        return GatewayRequest(
            model=self.model,
            prompts=({"messages": [*system(self.system), *messages(self.messages)]},),
            reasoning=self.shows_thinking,
            left_out=tuple(_offered(self.tools or ())[1]),
            **fields,
        )


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """The fields of /v1/messages that the gateway honours. max_tokens: a bound, which a smaller context lowers."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class ToolBody(Contract, frozen=True):
    """A tool that is a function."""

    name: str
    description: str | None = None
    input_schema: Mapping[str, Any] | None = None


class ToolChoice(Contract, frozen=True):
    """type: auto, any, tool or none. name: of the tool. disable_parallel_tool_use: the answer has one call at most."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Contract, frozen=True):
    """Whether the model reasons. display "omitted": its reasoning is not sent. A budget is not honoured."""

    type: str
    display: str | None = None


class OutputFormat(Contract, frozen=True):
    """The JSON schema that the answer fits."""

    type: str
    schema: Mapping[str, Any] | None = None


class OutputConfig(Contract, frozen=True):
    """effort: low to max. format: of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


def _choice(given: ToolChoice | None) -> Any:
    """The choice of a tool as OpenAI's chats write it."""
    if given is None or given.type in ("auto", "none"):
        return given and given.type
    if given.type == "any":
        return "required"
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    raise RequestError(f"tool_choice.type: not auto, any, tool or none (got {given.type!r})")


def _offered(tools: Sequence[Mapping[str, Any]]) -> tuple[list[FunctionBody], list[str]]:
    """The functions that the model is told, and a line for each tool that it is not. Raises RequestError for a type
    that is unknown."""
    told, left_out = list[FunctionBody](), list[str]()
    for index, tool in enumerate(tools):
        place, kind = f"tools[{index}]", tool.get("type") or "custom"
        if kind == "custom":
            fields = read_fields(ToolBody, tool, {}, f"{place}.")
            told.append(FunctionBody(fields.name, fields.description, fields.input_schema))
        elif isinstance(kind, str) and _OF_ANTHROPIC.fullmatch(kind):
            left_out.append(f"{place}: the model is not told about {kind}, which is no function")
        else:
            message = f"{place}.type: no tool of this type is known here (got {kind!r})"
            raise RequestError(message, "describe it by an input_schema, without a type")
    return told, left_out


def _schema(form: OutputFormat | None, field: str) -> Mapping[str, Any] | None:
    if form is None:
        return None
    if form.type != "json_schema" or not form.schema:
        raise RequestError(f"{field}: no such form", "send json_schema with a schema")
    return form.schema


class Message(Contract, frozen=True):
    """One message. The results of tools are blocks of the user's messages."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | tuple[Block, ...]


class Block(Contract, frozen=True):
    """A block of a message's content. id, name, input: of a tool_use. tool_use_id, content: of a tool_result."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Mapping[str, Any] = {}
    tool_use_id: str = ""
    content: str | tuple[Block, ...] | None = None


def system(given: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """The system message, if there is one."""
    blocks = [given] if isinstance(given, str) else _texts(given or (), "system")
    text = "\n".join(block for block in blocks if not block.startswith(BILLING))
    return [{"role": "system", "content": text}] if text else []


def messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as disagg's hosts take them. Raises RequestError for content that is not supported."""
    if given[-1].role == "assistant" and not _begins_answer(given[-1].content):
        raise RequestError(
            "messages: the last is the assistant's, and has no text that begins the answer", "leave it out"
        )
    names: dict[str, str] = {}
    written: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        place = f"messages[{index}].content"
        blocks = (Block("text", text=message.content),) if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            names |= {block.id: block.name for block in blocks if block.type == "tool_use"}
            written.append(_answer(blocks, place))
        else:
            written += _asked(message.role, blocks, place, names)
    return written


def _begins_answer(content: str | Sequence[Block]) -> bool:
    """Whether an answer may go on with this: it ends with a text."""
    return bool(content) if isinstance(content, str) else bool(content) and bool(content[-1].text)


def _asked(role: str, blocks: Sequence[Block], place: str, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A message for every tool_result, and one for all text that follows the last. names: of tools, by their calls."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts += _texts((block,), place, index)
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        yield _result(block, f"{place}[{index}].content", names)
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _result(block: Block, place: str, names: Mapping[str, str]) -> dict[str, Any]:
    content = [block.content] if isinstance(block.content, str) else _texts(block.content or (), place)
    written = {"role": "tool", "content": "\n".join(content), "tool_call_id": block.tool_use_id}
    return written | ({"name": name} if (name := names.get(block.tool_use_id)) else {})


def _answer(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    """An earlier answer. Reasoning that only Anthropic can read is left out."""
    of_kind: dict[str, list[Block]] = {"text": [], "thinking": [], "tool_use": [], "redacted_thinking": []}
    for index, block in enumerate(blocks):
        if block.type not in of_kind:
            raise _unsupported(block, f"{place}[{index}]")
        of_kind[block.type].append(block)
    written: dict[str, Any] = {"role": "assistant", "content": "\n".join(block.text for block in of_kind["text"])}
    if of_kind["thinking"]:
        written["reasoning"] = "\n".join(block.thinking for block in of_kind["thinking"])
    if calls := of_kind["tool_use"]:
        written["tool_calls"] = [{"name": one.name, "arguments": dict(one.input), "id": one.id} for one in calls]
    return written


def _texts(blocks: Sequence[Block], place: str, first: int = 0) -> list[str]:
    """The text of each block. first: number of the first one, for errors."""
    for index, block in enumerate(blocks, first):
        if block.type != "text":
            raise _unsupported(block, f"{place}[{index}]")
    return [block.text for block in blocks]


def _unsupported(block: Block, place: str) -> RequestError:
    return RequestError(f"{place}.type: models here read text only (got {block.type!r})", "send blocks of text")
