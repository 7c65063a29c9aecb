"""Calls for the tokens of a prompt: vLLM's POST /tokenize and POST /detokenize, and OpenAI's POST
/v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_MESSAGES, MAX_TOOLS, Token
from disagg.api.sampling import MAX_TOKENS
from disagg.errors import RequestError
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import REFUSED, CountedPrompt, GatewayRequest, Prompt, Written, read_fields
from disagg.gateway.dialects.chat import Message, ending, messages
from disagg.gateway.dialects.chat_tools import ChatTool, tools_of
from disagg.gateway.dialects.form import form_of
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.dialects.responses import Responses
from disagg.gateway.dialects.tools import offered

UNSUPPORTED: Final = REFUSED["tokenize"]


class InputTokens(Responses):
    """/v1/responses/input_tokens: the prompt that such a body of /v1/responses makes."""

    lists_tokens: ClassVar = False

    def counted(self, counted: CountedPrompt) -> Written:
        return {"object": "response.input_tokens", "input_tokens": counted.prompt_tokens}


class Tokenize:
    """/tokenize, of a text or a chat."""

    lists_tokens: ClassVar = True

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(TokenizeBody, body, UNSUPPORTED)
        if sum(given is not None for given in (fields.prompt, fields.content, fields.messages)) != 1:
            raise RequestError("prompt: a request has either a prompt or messages", "send one of them")
        prompt: Prompt = {}
        options = form_of(offered(tools_of(fields.tools or ())).functions, None, {})
        if fields.messages is None:
            prompt["prompt"] = fields.prompt or fields.content or ""
        else:
            prompt["messages"] = messages(fields.messages)
            options |= ending(fields.messages, fields.continue_final_message, fields.add_generation_prompt)
        if fields.chat_template_kwargs:
            options["chat_template_kwargs"] = fields.chat_template_kwargs
        echoed = {"return_token_strs": bool(fields.return_token_strs)}
        return GatewayRequest(model=fields.model, prompts=(prompt,), options=options, echoed=echoed)

    def counted(self, counted: CountedPrompt) -> Written:
        return {
            "count": counted.prompt_tokens,
            "max_model_len": counted.context,
            "tokens": [token.id for token in counted.tokens],
            "token_strs": self._texts(counted) if counted.request.echoed["return_token_strs"] else None,
        }

    def _texts(self, counted: CountedPrompt) -> list[str]:
        return [openai.token_name(token.id, token.bytes) for token in counted.tokens]

    def error(self, problem: Problem) -> Written:
        return openai.error_body(problem)


class Detokenize(Tokenize):
    """/detokenize: the text of token ids."""

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        fields = read_fields(DetokenizeBody, body, {})
        return GatewayRequest(model=fields.model, prompts=({"tokens": fields.tokens},))

    def counted(self, counted: CountedPrompt) -> Written:
        text = b"".join(token.bytes for token in counted.tokens).decode(errors="replace")
        return {"prompt": text, "content": text}


class TokenizeBody(Contract, frozen=True, kw_only=True):
    """The fields of /tokenize that the gateway honours. return_token_strs: with the text of each token. content:
    llama.cpp's name of `prompt`."""

    more_schema: ClassVar[Mapping[str, Any]] = {
        "oneOf": [
            {"required": [name], "properties": {name: {"type": kind}}}
            for name, kind in (("prompt", "string"), ("content", "string"), ("messages", "array"))
        ]
    }
    model: str
    return_token_strs: bool | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[tuple[ChatTool, ...], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Contract, frozen=True, kw_only=True):
    """The fields of /detokenize."""

    model: str
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_TOKENS)]
