"""The calls of the servers: every path with its body, its answers and its errors. GET /openapi.json is made from it."""

from __future__ import annotations

from typing import Any, Final

from disagg.api import openapi
from disagg.api.base import Contract
from disagg.api.events import (
    DoneEvent,
    ErrorAnswer,
    ErrorEvent,
    LocalEvent,
    ProgressEvent,
    ScoredEvent,
    ScoresEvent,
    ShippedEvent,
    SlotEvent,
    TokensEvent,
)
from disagg.api.keeper import (
    DeleteBody,
    KeepBody,
    LoadEvent,
    LoadModelBody,
    ModelsAnswer,
    PinBody,
    PullBody,
    PullEvent,
    UnloadBody,
)
from disagg.api.names import Role
from disagg.api.openapi import AnswerSpec, Operation, failures
from disagg.api.requests import CountBody, DecodeBody, GenerateBody, LeaseBody, PrefillBody, PromptBody, ScoreBody
from disagg.api.status import CountAnswer, Health, LeaseAnswer, Liveness, Load, Status
from disagg.errors import (
    BodyTooLarge,
    CapabilityMissing,
    ContextLengthExceeded,
    DeadlineExceeded,
    DisaggError,
    FleetError,
    HandoffError,
    KVMemoryExceeded,
    ModelBusy,
    ModelError,
    Overloaded,
    RequestError,
    SchemaTooComplex,
    ServerUnavailable,
    Unauthorized,
    UnknownModel,
)
from disagg.version import VERSION

_GET_ERRORS: Final = (Unauthorized, Overloaded)
_BODY_ERRORS: Final = (RequestError, Unauthorized, BodyTooLarge, Overloaded)
_PROMPT_ERRORS: Final = (
    *_BODY_ERRORS,
    ContextLengthExceeded,
    UnknownModel,
    ModelError,
    CapabilityMissing,
    ServerUnavailable,
    DeadlineExceeded,
)
_ANSWER: Final = (TokensEvent, DoneEvent)
_TOKEN: Final = "the fleet's token; hosts.toml names its file as token_file"


def calls(role: Role) -> tuple[Operation, ...]:
    """Every call that a server of this role answers."""
    return (*(_DECODE if role == "decode" else _PREFILL), _GENERATE, _SCORE, *_COMMON)


def server_document(role: Role) -> dict[str, Any]:
    """What GET /openapi.json answers."""
    return openapi.document(f"disagg {role} server", VERSION, _TOKEN, calls(role))


def keeper_document() -> dict[str, Any]:
    """The same of the keeper of a host with several models."""
    return openapi.document("disagg keeper", VERSION, _TOKEN, KEEPER_CALLS)


def _streamed(
    path: str, summary: str, body: type[PromptBody], events: tuple[Any, ...], errors: tuple[type[DisaggError], ...]
) -> Operation:
    named = {kind.event: kind for kind in (*events, ProgressEvent, ErrorEvent)}
    stream = AnswerSpec("Server-sent events, one line of JSON each.", media=openapi.EVENTS, events=named)
    return Operation("POST", path, summary, {200: stream, **failures((*_PROMPT_ERRORS, *errors), ErrorAnswer)}, body)


_DECODE: Final = (
    _streamed(
        "/decode",
        "Generate an answer from KV that a prefill host delivers.",
        DecodeBody,
        (SlotEvent, LocalEvent, *_ANSWER),
        (KVMemoryExceeded, SchemaTooComplex, HandoffError),
    ),
)
_PREFILL: Final = (
    _streamed(
        "/prefill",
        "Compute a prompt and deliver its KV to a decode host.",
        PrefillBody,
        (ShippedEvent,),
        (HandoffError,),
    ),
)
_GENERATE: Final = _streamed(
    "/generate", "Prompt and answer on this host alone.", GenerateBody, _ANSWER, (KVMemoryExceeded, SchemaTooComplex)
)
_SCORE: Final = _streamed(
    "/score",
    "The log-probability of each token of a prompt.",
    ScoreBody,
    (ScoresEvent, ScoredEvent),
    (KVMemoryExceeded,),
)
_LEASE: Final = Operation(
    "POST",
    "/lease",
    "Extend the leases of requests.",
    {200: AnswerSpec("Extended.", (LeaseAnswer,)), **failures(_BODY_ERRORS, ErrorAnswer)},
    LeaseBody,
)
_COUNT: Final = Operation(
    "POST",
    "/count",
    "Count the tokens of a prompt.",
    {200: AnswerSpec("Counted.", (CountAnswer,)), **failures(_PROMPT_ERRORS, ErrorAnswer)},
    CountBody,
)
_UNHEALTHY: Final = "The engine is stalled or has stopped."
_COMMON: Final = (
    _LEASE,
    _COUNT,
    Operation(
        "GET",
        "/health",
        "Whether the server works; more with the token.",
        {200: AnswerSpec("It works.", (Health, Liveness)), 503: AnswerSpec(_UNHEALTHY, (Health, Liveness))},
        public=True,
    ),
    Operation(
        "GET",
        "/load",
        "What routing needs.",
        {200: AnswerSpec("The server's state and load.", (Load,)), **failures(_GET_ERRORS, ErrorAnswer)},
    ),
    Operation(
        "GET",
        "/status",
        "Health, load, memory and counters.",
        {200: AnswerSpec("As it is now.", (Status,)), **failures(_GET_ERRORS, ErrorAnswer)},
    ),
    Operation(
        "GET",
        openapi.PATH,
        "This document.",
        {200: AnswerSpec("OpenAPI.", (dict[str, Any],)), **failures(_GET_ERRORS, ErrorAnswer)},
    ),
)


def _of_models(path: str, summary: str, body: type[Contract], *errors: type[DisaggError]) -> Operation:
    answers = {200: AnswerSpec("The models as they are then.", (ModelsAnswer,))}
    return Operation(
        "POST", path, summary, {**answers, **failures((*_BODY_ERRORS, UnknownModel, *errors), ErrorAnswer)}, body
    )


def _followed(
    path: str, summary: str, body: type[Contract], event: type[LoadEvent | PullEvent], *errors: type[DisaggError]
) -> Operation:
    named = {event.event: event, ErrorEvent.event: ErrorEvent}
    stream = AnswerSpec("Server-sent events, one line of JSON each.", media=openapi.EVENTS, events=named)
    return Operation(
        "POST", path, summary, {200: stream, **failures((*_BODY_ERRORS, UnknownModel, *errors), ErrorAnswer)}, body
    )


KEEPER_CALLS: Final = (
    _followed("/models/load", "Load a model, or wait until it is loaded.", LoadModelBody, LoadEvent, ModelError),
    _of_models("/models/keep", "How long a loaded model stays.", KeepBody),
    _of_models("/models/unload", "Unload a model.", UnloadBody, ModelBusy),
    _of_models("/models/pin", "Pin a model, or unpin it.", PinBody),
    _followed("/models/pull", "Fetch a model's files.", PullBody, PullEvent, FleetError),
    _of_models("/models/delete", "Remove a model's files.", DeleteBody, ModelBusy, FleetError),
    *_COMMON[2:],
)
"""What the keeper of a host with several models answers."""
