"""What every API is made of: a dialect reads bodies as requests in the gateway's own form, and a writer writes what
happens to such a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypedDict, TypeVar, runtime_checkable

import msgspec
import tomli

from disagg.api.base import Contract, InvalidValue
from disagg.api.events import PromptToken, TokenLogprob
from disagg.api.requests import DEFAULT_DEADLINE_S, MAX_DEADLINE_S, Messages, ToolCall
from disagg.errors import RequestError
from disagg.gateway.dialects.problems import Problem
from disagg.http.stream import EVENT_STREAM, event_bytes
from disagg.inference.types import Completion, Stage

MAX_CHOICES: Final = 16
"""Answers to one request: prompts times `n`."""
SEEDS: Final = 1 << 63
"""A seed is below."""
DEFAULT_MAX_TOKENS: Final = 4096
"""The longest answer to a request that names no bound, if the context leaves as much: a decode host reserves room for
the KV of prompt and answer."""
SLOWEST_TOKENS_S: Final = 5.0
"""Tokens per second of the slowest answer that is complete at its deadline."""


class RefusedField(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A field that would change the answer and cannot be honoured. but: the values besides null that change nothing.
    why: it cannot be. instead: what to send."""

    why: str
    instead: str
    but: tuple[Any, ...] = ()


Refused = Mapping[str, RefusedField]
"""Fields by name."""
REFUSED: Final[Mapping[str, Refused]] = msgspec.convert(
    tomli.loads(Path(__file__).with_name("refused.toml").read_text("utf-8")), dict[str, dict[str, RefusedField]]
)
"""The refused fields of each API."""

Written = Mapping[str, Any]
"""A JSON object as a caller gets it."""
Body = TypeVar("Body", bound=Contract)


class Reader(Protocol):
    """What reads the bodies of one call."""

    def read(self, body: Mapping[str, Any]) -> GatewayRequest:
        """The request that this body makes. Raises RequestError, which begins with the name of a wrong field."""
        ...

    def error(self, problem: Problem) -> Written:
        """The body of an answer that is an error."""
        ...


class Dialect(Reader, Protocol):
    """One API. framing: of its streams."""

    name: ClassVar[str]
    framing: ClassVar[Framing]

    def writer(self, head: Head) -> Writer: ...


class CountedPrompt(NamedTuple):
    """How many tokens the prompt of a request has; with the tokens, if its dialect lists them. context: the model's."""

    request: GatewayRequest
    prompt_tokens: int
    tokens: Sequence[PromptToken]
    context: int


class CountingDialect(Reader, Protocol):
    """A call that asks for the tokens of a prompt, and for no answer to it. lists_tokens: for which ones."""

    lists_tokens: ClassVar[bool]

    def counted(self, counted: CountedPrompt) -> Written:
        """What the caller gets."""
        ...


class Writer(Protocol):
    """Writes one answer. `piece`, `finished` and `end` give the objects of a stream; `whole` is everything at once."""

    def piece(self, piece: AnswerPiece) -> Iterable[Written]: ...

    def finished(self, finished: Finished) -> Iterable[Written]: ...

    def end(self, completions: Sequence[Completion]) -> Iterable[Written]: ...

    def error(self, problem: Problem) -> Iterable[Written]:
        """The last objects of a stream that is cut."""
        ...

    def whole(self, completions: Sequence[Completion]) -> Written: ...


@runtime_checkable
class ScoresWriter(Protocol):
    """A Writer of a dialect whose requests may have a `scoring`. scored: is called before the pieces of the answer,
    also if it is no stream."""

    def scored(self, prompt: ScoredPrompt) -> Sequence[Written]: ...


def written(writer: Writer, event: AnswerEvent) -> Iterable[Written]:
    """The objects of a stream for this event."""
    if isinstance(event, ScoredPrompt):
        assert isinstance(writer, ScoresWriter), "only its dialect asks for scores"
        return writer.scored(event)
    return writer.piece(event) if isinstance(event, AnswerPiece) else writer.finished(event)


class Framing(NamedTuple):
    """How the objects of a stream are sent. keep_alive: sent while there is nothing else to send; may be empty. done:
    sent after the last object of a stream that is complete."""

    media_type: str
    frame: Callable[[Written], bytes]
    keep_alive: bytes = b""
    done: bytes = b""

    def join(self, objects: Iterable[Written]) -> bytes:
        """The bytes of these objects."""
        return b"".join(map(self.frame, objects))


def named_event(body: Written) -> bytes:
    """A server-sent event that has the name of the object's type."""
    return event_bytes(msgspec.json.encode(body), body["type"])


COMMENT: Final = b": keep-alive\n\n"
DATA_EVENTS: Final = Framing(
    EVENT_STREAM, lambda body: event_bytes(msgspec.json.encode(body)), COMMENT, b"data: [DONE]\n\n"
)
"""Server-sent events without names."""
JSON_LINES: Final = Framing("application/x-ndjson", lambda body: msgspec.json.encode(body) + b"\n")
"""Lines of JSON, without a sign of life: a line that is none would break Ollama's clients."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer repeats. model: as the caller has named it. created: seconds since 1970. via: the
    gateways that have passed the request on, this one included, as the Via header names them. fingerprint: of a host's
    model, by the host's name; empty if the host states none."""

    request: GatewayRequest
    request_id: str
    created: float
    via: str = ""
    fingerprint: Callable[[str], str] = lambda _: ""

    @property
    def model(self) -> str:
        return self.request.model


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """What a caller asks for.

    prompts: each is answered `n` times; the answers are numbered prompt by prompt. shown: so many of the `n` are
    sent, the likeliest; None: all. options: those of AsyncClient.stream that the caller has set. stream: send the
    answer while it is generated. include_usage: end a stream with the numbers of tokens; usage_so_far: each object
    of it has those so far. longest: the bound on the answer that the caller has set, in tokens. reasoning: the
    caller wants the model's reasoning, if its dialect makes a choice. seal_reasoning: it is also sent in a form
    that agents send back as it is. called_as: the caller's names of functions that have another name in the prompt,
    by that name. left_out: a line for each part of the request that is not in the prompt, or not enforced; the
    answer's warnings begin with them. echoed: fields of the body that the answer repeats. scoring: what the caller
    wants to know of the prompts themselves. items: those of the body, if it is to be followed by others.
    ids_as_names: log-probabilities name tokens by their ids, not by their texts. keep_alive_s: so long the model is to
    stay loaded after the answer, None: as its hosts are configured.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    shown: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    usage_so_far: bool = False
    longest: int | None = None
    reasoning: bool = True
    seal_reasoning: bool = False
    called_as: Mapping[str, CalledAs] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    echoed: Mapping[str, Any] = field(default_factory=dict)
    items: Sequence[Any] = ()
    scoring: Scoring | None = None
    ids_as_names: bool = False
    keep_alive_s: float | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def with_options(self, **options: Any) -> GatewayRequest:
        """This request with more options of AsyncClient.stream."""
        return replace(self, options={**self.options, **options})

    def arguments(self, choice: int) -> dict[str, Any]:
        """The arguments of AsyncClient.stream for one answer.

        The first answer to a prompt leaves its KV to the others. Answers to the same prompt differ if the caller has
        set a seed: each has its own, counted up from that one. -1 is no seed, as in vLLM and llama.cpp; the other
        negative ones of OpenAI's 64 bits stand for those from 0.
        """
        prompt, repetition = divmod(choice, self.n)
        options = dict(self.options)
        if self.n > 1 and not repetition:
            options["hold_prompt"] = True
        if (seed := options.pop("seed", None)) not in (None, -1):
            options["seed"] = (seed + repetition) % SEEDS if -SEEDS <= seed < SEEDS else seed
        timeout = deadline_s(options.get("max_tokens", DEFAULT_MAX_TOKENS))
        return {"model": self.model, **self.prompts[prompt], **options, "timeout": timeout}


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a caller wants to know of a prompt. echo: its text comes before that of the answer, with log-probabilities
    if the answer has them. listed: its tokens are listed with so many alternatives, None: they are not. top: the most
    alternatives that are needed; None: the text suffices. alone: there is no answer. repeats: so many answers list the
    same prompt."""

    echo: bool
    listed: int | None
    top: int | None
    alone: bool
    repeats: int = 1

    @property
    def field(self) -> str:
        """The field of the body that asks for it."""
        return "echo" if self.echo else "prompt_logprobs"

    @property
    def field_of_top(self) -> str:
        """The one that asks for most alternatives."""
        return "prompt_logprobs" if self.listed == self.top else "logprobs"

    def listed_of(self, tokens: int) -> int:
        """The log-probabilities that are listed of a prompt of so many tokens."""
        return 0 if self.top is None else tokens * (self.top + 1) * self.repeats


class Prompt(TypedDict, total=False):
    """One prompt in one of the forms that AsyncClient takes."""

    prompt: str
    messages: Messages
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class CalledAs:
    """The caller's name of a function. namespace: of its tool, None if it has none."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def answer_length(given: int | None, *, lowered: bool = True) -> dict[str, Any]:
    """The options of AsyncClient.stream that bound the answer; given: what the caller has set, in tokens. lowered: to
    what the context leaves; else a longer one is refused."""
    if given is None:
        return {"max_tokens": DEFAULT_MAX_TOKENS, "fit_context": True}
    return {"max_tokens": given} | ({"fit_context": True} if lowered else {})


def deadline_s(max_tokens: int) -> float:
    """Seconds for a request with an answer of at most so many tokens: those of any request, and more for an answer
    that takes longer even if nothing goes wrong. A host that is stuck is noticed in seconds, whatever the deadline."""
    return min(MAX_DEADLINE_S, DEFAULT_DEADLINE_S + max(0, max_tokens) / SLOWEST_TOKENS_S)


def thinking(on: bool) -> dict[str, Any]:
    """The variables of chat templates that turn a model's reasoning on or off, under both names that templates use."""
    return {"enable_thinking": on, "thinking": on}


def read_fields(kind: type[Body], body: Mapping[str, Any], unsupported: Refused, place: str = "") -> Body:
    """The fields of a body that its dialect honours; all others are ignored, except those that would change the answer.

    unsupported: those. Raises RequestError for one that would, and for a field of the wrong type. place: before the
    name of a field, such as `text.`
    """
    for name, refused in unsupported.items():
        if (value := body.get(name)) is not None and value not in refused.but:
            raise RequestError(f"{place}{name}: not supported: {refused.why}", refused.instead)
    try:
        return kind.from_json(body)
    except InvalidValue as error:
        raise RequestError(f"{place}{error}") from None


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """More of answer number `choice`: the tokens of a decode step or several. They have completed reasoning, then text,
    then tool calls. stage: where its request is; None in parts of an answer that is complete."""

    choice: int
    text: str
    tokens: tuple[TokenLogprob, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stage: Stage | None = None

    def joined(self, later: AnswerPiece) -> AnswerPiece | None:
        """This piece and the next one as one; None if that would change the order of what they hold, or which tokens
        belong to the text."""
        if self.tool_calls or (self.reasoning and later.text) or (self.text and later.reasoning):
            return None
        return AnswerPiece(
            self.choice,
            self.text + later.text,
            self.tokens + later.tokens,
            self.reasoning + later.reasoning,
            later.tool_calls,
            later.stage,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """Answer number `choice` is complete."""

    choice: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The tokens of the prompt of answer number `choice`, which follows; none if its text suffices."""

    choice: int
    tokens: tuple[PromptToken, ...]


AnswerEvent = AnswerPiece | Finished | ScoredPrompt


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as JSON."""
    return msgspec.json.encode(call.arguments).decode()


class Usage(NamedTuple):
    """Tokens of all answers to one request. A prompt that is answered several times counts once. cached_tokens: of the
    prompts, whose KV the decode hosts had from earlier requests. reasoning_tokens: of the answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int

    @classmethod
    def of(cls, completions: Sequence[Completion], n: int) -> Usage:
        """completions: by number of the answer, `n` for each prompt."""
        figures = [completion.metrics for completion in completions]
        return cls(
            sum(one.prompt_tokens for one in figures[::n]),
            sum(one.completion_tokens for one in figures),
            sum(one.held_tokens for one in figures[::n]),
            sum(one.reasoning_tokens for one in completions),
        )
