"""OpenAI's POST /v1/chat/completions: how a chat is read, and how its answer is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.events import TokenLogprob
from disagg.api.requests import MAX_MESSAGES, MAX_TOOLS, ToolCall
from disagg.errors import RequestError
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import (
    REFUSED,
    AnswerPiece,
    Finished,
    GatewayRequest,
    Head,
    ScoredPrompt,
    Scoring,
    Written,
    arguments_text,
)
from disagg.gateway.dialects.chat_tools import ChatTool, choice_of, tools_of
from disagg.gateway.dialects.form import form_of
from disagg.gateway.dialects.reasoning import ReasoningFields
from disagg.gateway.dialects.tools import INPUT, input_of, offered, told
from disagg.inference.types import Completion


class ChatCompletions(openai.OpenAIDialect):
    """The dialect of /v1/chat/completions."""

    name: ClassVar = "chat"

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = openai.read(ChatBody, body, openai.OF_CHATS, REFUSED["chats"])
        longest = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        options = fields.options(longest)
        if fields.logprobs:
            options["logprobs"] = fields.top_logprobs or 0
        elif fields.top_logprobs:
            raise RequestError("top_logprobs: needs logprobs", "set logprobs to true")
        options |= fields.template()
        offer = offered([] if fields.tool_choice == "none" else tools_of(fields.tools or ()))
        functions, choice = told(offer, choice_of(fields.tool_choice))
        options |= form_of(functions, choice, fields.form, parallel=fields.parallel_tool_calls)
        openai.require_listable(fields)
        top = fields.prompt_logprobs
        options |= ending(fields.messages, fields.continue_final_message, fields.add_generation_prompt)
        return GatewayRequest(
            model=fields.model,
            prompts=({"messages": messages(fields.messages)},),
            n=fields.n or 1,
            options=options,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            usage_so_far=fields.usage_so_far,
            longest=longest,
            reasoning=fields.include_reasoning is not False and not (fields.reasoning and fields.reasoning.exclude),
            called_as=offer.names,
            left_out=(*offer.left_out, *verbosity(fields.verbosity, "verbosity")),
            scoring=Scoring(echo=False, listed=top, top=top, alone=False) if top is not None else None,
            ids_as_names=bool(fields.return_tokens_as_token_ids),
            keep_alive_s=fields.keep_alive_s,
        )

    def writer(self, head: Head) -> ChatWriter:
        return ChatWriter(head)


class ChatBody(ReasoningFields, frozen=True, kw_only=True):
    """The fields of the body that the gateway honours. include_reasoning: whether it is sent."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[tuple[ChatTool, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    verbosity: str | None = None


class ChatWriter(openai.ObjectWriter):
    """Writes one answer as chat.completion chunks, or as one chat.completion."""

    prefix = "chatcmpl"
    chunk = "chat.completion.chunk"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._calls: dict[int, int] = {}  # written so far, by choice; the choices that have begun
        self._prompt: ScoredPrompt | None = None

    def scored(self, prompt: ScoredPrompt) -> Sequence[Written]:
        self._prompt = prompt
        return ()

    def piece(self, piece: AnswerPiece) -> Iterator[Written]:
        choice, logprobs = piece.choice, self._logprobs_body(piece.tokens)
        self._note(piece)
        if choice not in self._calls:
            yield self._start(choice)
        self._tokens += len(piece.tokens)
        if piece.reasoning and self._request.reasoning:
            yield self._chunk(choice, _reasoning(piece.reasoning))
        if piece.text or logprobs:
            yield self._chunk(choice, {"content": piece.text}, logprobs=logprobs)
        if piece.tool_calls:
            first = self._calls[choice]
            self._calls[choice] += len(piece.tool_calls)
            calls = [{"index": number, **self._call(call)} for number, call in enumerate(piece.tool_calls, first)]
            yield self._chunk(choice, {"tool_calls": calls})

    def finished(self, finished: Finished) -> Iterator[Written]:
        if finished.choice not in self._calls:
            yield self._start(finished.choice)
        completion = finished.completion
        yield self._chunk(
            finished.choice, {}, finish_reason=completion.finish_reason, disagg=openai.disagg_body(completion)
        )

    def whole(self, completions: Sequence[Completion]) -> Written:
        choices = [
            {
                "index": index,
                "message": self._answer(one),
                "logprobs": self._logprobs_body(one.tokens),
                "finish_reason": one.finish_reason,
                "disagg": openai.disagg_body(one),
            }
            for index, one in enumerate(completions)
        ]
        top = self._request.scoring.listed if self._request.scoring is not None else None
        listed = openai.listed(self._prompt, top) if self._prompt is not None and top is not None else None
        return {**self._object("chat.completion", choices, completions), "prompt_logprobs": listed}

    def _start(self, choice: int) -> Written:
        self._calls[choice] = 0
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def _chunk(self, choice: int, delta: Written, **fields: Any) -> Written:
        one = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return self._object(self.chunk, (one,))

    def _answer(self, completion: Completion) -> dict[str, Any]:
        """The whole answer. A message that only calls tools has no content. vLLM's clients read `reasoning` of each."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "reasoning": None}
        if completion.reasoning and self._request.reasoning:
            message |= _reasoning(completion.reasoning)
        if completion.tool_calls:
            message["content"] = completion.text or None
            message["tool_calls"] = [self._call(call) for call in completion.tool_calls]
        return message

    def _call(self, call: ToolCall) -> dict[str, Any]:
        """A call as the caller knows its tool."""
        called = self._request.called_as.get(call.name)
        if called is not None and called.kind == "custom":
            return {"id": call.id, "type": "custom", "custom": {"name": called.name, "input": input_of(call.arguments)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}

    def _logprobs_body(self, tokens: Sequence[TokenLogprob]) -> Written | None:
        if not self._logprobs or not tokens:
            return None
        return {"content": [openai.logprob_body(token, ids=self._request.ids_as_names) for token in tokens]}


def _reasoning(text: str) -> dict[str, str]:
    """The reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


def verbosity(given: str | None, field: str) -> tuple[str, ...]:
    """What is not in the prompt of a request for a longer or shorter answer. field: where it was given."""
    return () if given in (None, "medium") else (f"{field}: the model is not told",)


def ending(given: Sequence[Message], goes_on: bool | None, begins: bool | None) -> dict[str, bool]:
    """The option of AsyncClient.stream that says how the prompt of these messages ends. goes_on, begins: the caller's
    continue_final_message and add_generation_prompt. Mistral's and DeepSeek's clients mark the last message instead."""
    if goes_on and begins:
        raise RequestError("continue_final_message: not together with add_generation_prompt", "set that to false")
    if goes_on or given[-1].prefix:
        return {"continue_final_message": True}
    return {"add_generation_prompt": False} if begins is False else {}


def messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as disagg's hosts take them. Raises RequestError for content that is not text."""
    names = {call.id: call.name for message in given for call in message.tool_calls or ()}
    return [_message(message, f"messages[{index}]", names) for index, message in enumerate(given)]


class Message(Contract, frozen=True):
    """One message of the chat. reasoning, reasoning_content: the same under two names. prefix: the answer goes on with
    the last one."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | tuple[ContentPart, ...] | None = None
    tool_calls: tuple[CallBody, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None


class ContentPart(Contract, frozen=True):
    """A part of a content. Only text is understood."""

    type: str
    text: str = ""


class FunctionCall(Contract, frozen=True):
    """arguments: JSON."""

    name: str
    arguments: str = "{}"


class CustomCall(Contract, frozen=True):
    """A call of a custom tool."""

    name: str
    input: str = ""


class CallBody(Contract, frozen=True):
    """A tool call of an earlier answer, of a function or of a custom tool."""

    function: FunctionCall | None = None
    id: str = ""
    custom: CustomCall | None = None

    @property
    def name(self) -> str:
        called = self.custom or self.function
        return called.name if called is not None else ""


def _message(message: Message, place: str, names: dict[str, str]) -> dict[str, Any]:
    """names: of the tools that were called before, by the id of the call."""
    if message.role == "function":
        raise RequestError(f"{place}.role: tool has taken the place of function", "send the role tool")
    role = "system" if message.role == "developer" else message.role
    written: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{place}.content")}
    if reasoning := message.reasoning or message.reasoning_content:
        written["reasoning"] = reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            call_of(call, f"{place}.tool_calls[{index}]", "function.arguments")
            for index, call in enumerate(message.tool_calls)
        ]
    if role == "tool" and message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
        if name := message.name or names.get(message.tool_call_id):
            written["name"] = name
    return written


def text_of(content: str | Sequence[ContentPart] | None, place: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content. Raises RequestError for a part of another kind than these."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in kinds:
            message = f"{place}[{index}].type: models here read text only (got {part.type!r})"
            raise RequestError(message, "send parts of text")
    return "".join(part.text for part in content)


def call_of(call: CallBody, place: str, field: str) -> dict[str, Any]:
    """The call as disagg's hosts take it: templates want the arguments as an object. field: where they were given."""
    if call.custom is not None:
        return {"name": call.custom.name, "arguments": {INPUT: call.custom.input}, "id": call.id}
    if call.function is None:
        raise RequestError(f"{place}.function: missing", "send the function's name and arguments")
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.{field}: not a JSON object", "send the arguments as the text of an object")
    return {"name": call.function.name, "arguments": arguments, "id": call.id}
