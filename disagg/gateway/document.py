"""The calls of the gateway: every path with its body and its errors. GET /openapi.json is made from it.

Answers of OpenAI's, Anthropic's and Ollama's APIs have the shapes of those APIs, which are not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from disagg.api import openapi
from disagg.api.base import Contract
from disagg.api.gateway import HistoryAnswer, ParallelAnswer, ParallelBody, ParallelChunk, ParallelEnd, ParallelResult
from disagg.api.openapi import AnswerSpec, Operation
from disagg.api.status import Liveness
from disagg.gateway.dialects import anthropic, managing, ollama
from disagg.gateway.dialects.anthropic_writer import AnthropicError
from disagg.gateway.dialects.chat import ChatBody
from disagg.gateway.dialects.completions import CompletionBody
from disagg.gateway.dialects.ollama import OllamaError
from disagg.gateway.dialects.openai import ErrorBody
from disagg.gateway.dialects.responses import ResponsesBody
from disagg.gateway.dialects.tokens import DetokenizeBody, TokenizeBody
from disagg.version import VERSION

_KEY: Final = "a key of `disagg keys add`; none is needed on this machine until there is one"


class TokenCount(Contract, frozen=True):
    """How many tokens a prompt has."""

    input_tokens: int


class TokenizedPrompt(Contract, frozen=True):
    """The tokens of a prompt. token_strs: their texts, if they were asked for."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizedPrompt(Contract, frozen=True):
    """The text of token ids."""

    prompt: str


_BUSY: Final = 409
_TEXTS: Final[Mapping[int, str]] = {
    400: "A field is wrong or not supported, or the context is too small.",
    401: "The key is missing, wrong or revoked.",
    403: "The key is not for this model, or may not do this with it.",
    404: "The fleet has no such model.",
    _BUSY: "Requests use the model.",
    413: "The body is too large.",
    429: "The key has used up its share, or the hosts are busy.",
    500: "The gateway failed.",
    503: "No host of the model answers, or there is no place for a connection.",
    504: "The answer was not complete in time.",
}
_PROBLEMS: Final = tuple(status for status in _TEXTS if status != _BUSY)


def calls() -> Iterator[Operation]:
    """Every call that programs make. The paths below /v1 are also served without it."""
    ok = {200: AnswerSpec("The gateway can answer a request.", (Liveness,))}
    down = {503: AnswerSpec("No host of any model is up.", (Liveness,))}
    yield Operation("GET", "/health", "Whether the gateway can answer a request.", {**ok, **down}, public=True)
    yield Operation("GET", "/metrics", "Figures for Prometheus.", _answers("Prometheus' text format.", ErrorBody, 401))
    yield Operation("GET", openapi.PATH, "This document.", {200: AnswerSpec("OpenAPI.")}, public=True)
    for prefix in ("/v1", ""):
        yield _post(f"{prefix}/chat/completions", "Answer a chat.", ChatBody, ErrorBody)
        yield _post(f"{prefix}/completions", "Continue a text.", CompletionBody, ErrorBody)
        together = _post(f"{prefix}/parallel", "Answer several requests together.", ParallelBody, ErrorBody)
        yield replace(together, answers=_of_parallel(together.answers))
        yield _post(f"{prefix}/responses", "Answer a chat, item by item.", ResponsesBody, ErrorBody)
        yield _post(f"{prefix}/messages", "Anthropic: answer a chat.", anthropic.MessagesBody, AnthropicError)
        summary = "Anthropic: count the tokens of a prompt."
        counted = _counted(TokenCount, AnthropicError)
        yield Operation("POST", f"{prefix}/messages/count_tokens", summary, counted, anthropic.CountBody)
        summary, counted = "Count the tokens of a prompt.", _counted(TokenCount, ErrorBody)
        yield Operation("POST", f"{prefix}/responses/input_tokens", summary, counted, ResponsesBody)
        listed = _counted(TokenizedPrompt, ErrorBody)
        yield Operation("POST", f"{prefix}/tokenize", "vLLM: the tokens of a prompt.", listed, TokenizeBody)
        text = _counted(DetokenizedPrompt, ErrorBody)
        yield Operation("POST", f"{prefix}/detokenize", "vLLM: the text of tokens.", text, DetokenizeBody)
        models = _answers("The models that the key is for.", ErrorBody, 401)
        yield Operation("GET", f"{prefix}/models", "List the models.", models)
        model = _answers("The model.", ErrorBody, 401, 403, 404)
        yield Operation("GET", f"{prefix}/models/{{model}}", "Describe a model.", model)
    yield _post("/api/chat", "Ollama: answer a chat.", ollama.OllamaChatBody, OllamaError)
    yield _post("/api/generate", "Ollama: continue a text.", ollama.OllamaGenerateBody, OllamaError)
    yield Operation("GET", "/api/tags", "Ollama: list the models.", _answers("The models.", OllamaError, 401))
    show = _answers("The model.", OllamaError, 400, 401, 403, 404, 413)
    yield Operation("POST", "/api/show", "Ollama: describe a model.", show, managing.NamedBody)
    yield Operation("POST", "/api/copy", "Ollama: refused.", _failures(OllamaError, 400, 401, 413), managing.CopyBody)
    pulled = _answers("Lines of JSON, or the last one: how far it is.", OllamaError, *_PROBLEMS)
    yield Operation("POST", "/api/pull", "Ollama: fetch a model's files to its hosts.", pulled, managing.PullBody)
    deleted = _answers("The files are gone.", OllamaError, *_PROBLEMS, _BUSY)
    yield Operation("DELETE", "/api/delete", "Ollama: remove a model's files.", deleted, managing.NamedBody)
    served = _answers("The models.", OllamaError, 401)
    yield Operation("GET", "/api/ps", "Ollama: list the models that are loaded.", served)
    listed = _answers("The models.", ErrorBody, 401)
    yield Operation("GET", "/api/v1/models", "LM Studio: list the models.", listed)
    loaded = _answers("The model is loaded.", ErrorBody, *_PROBLEMS)
    yield Operation("POST", "/api/v1/models/load", "LM Studio: load a model.", loaded, managing.LoadBody)
    gone = _answers("The model is unloaded.", ErrorBody, *_PROBLEMS, _BUSY)
    yield Operation("POST", "/api/v1/models/unload", "LM Studio: unload a model.", gone, managing.UnloadBody)
    yield Operation(
        "GET",
        "/api/version",
        "Ollama: its version, and that of disagg.",
        {200: AnswerSpec("The version.")},
        public=True,
    )
    history = {200: AnswerSpec("The newest first.", (HistoryAnswer,)), **_failures(ErrorBody, 400, 401, 403, 404)}
    yield Operation("GET", "/api/history", "Requests that have ended.", history)
    live = _answers("Server-sent events: what the fleet is doing.", ErrorBody, 401)
    yield Operation("GET", "/api/live", "Requests and hosts now.", live)


def gateway_document(*, keyless: bool = False) -> dict[str, Any]:
    """What GET /openapi.json answers. keyless: callers need no key now."""
    document = openapi.document("disagg gateway", VERSION, _KEY, list(calls()))
    return {**document, "security": [{}, *document["security"]]} if keyless else document


def _post(path: str, summary: str, body: type[Contract], error: type[Contract]) -> Operation:
    return Operation("POST", path, summary, _answers("The answer, streamed or whole.", error, *_PROBLEMS), body)


def _counted(answer: type[Contract], error: type[Contract]) -> dict[int, AnswerSpec]:
    """Of calls for the tokens of a prompt."""
    return {200: AnswerSpec("The tokens of the prompt.", (answer,)), **_failures(error, *_PROBLEMS)}


def _of_parallel(answers: Mapping[int, AnswerSpec]) -> dict[int, AnswerSpec]:
    """What fails with a status of the whole body; all else has its status in the result of its request."""
    events = (ParallelChunk, ParallelResult, ParallelEnd)
    whole = AnswerSpec("The results, or what happens to each request.", (ParallelAnswer,), unnamed=events)
    return {200: whole, **{status: answers[status] for status in (400, 401, 413, 500, 503)}}


def _answers(description: str, error: type[Contract], *statuses: int) -> dict[int, AnswerSpec]:
    return {200: AnswerSpec(description), **_failures(error, *statuses)}


def _failures(error: type[Contract], *statuses: int) -> dict[int, AnswerSpec]:
    return {status: AnswerSpec(_TEXTS[status], (error,)) for status in statuses}
