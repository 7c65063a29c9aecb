"""What the OpenAI dialects share: sampling fields, fields that are refused, errors, usage, server-sent events."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.events import PromptToken, TokenLogprob
from disagg.api.sampling import MAX_TOP, Sampling
from disagg.errors import RequestError
from disagg.gateway.dialects.base import (
    DATA_EVENTS,
    MAX_CHOICES,
    REFUSED,
    AnswerPiece,
    Body,
    Head,
    Refused,
    ScoredPrompt,
    Usage,
    Written,
    answer_length,
    read_fields,
)
from disagg.gateway.dialects.form import FormFields
from disagg.gateway.dialects.managing import KeepAlive, keep_alive_s
from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion

UNSUPPORTED: Final = REFUSED["openai"]
OF_REASONING: Final = frozenset(
    {"chat_template_kwargs", "enable_thinking", "reasoning", "reasoning_effort", "think", "thinking"}
)
OF_CHATS: Final = OF_REASONING | {
    "tools",
    "tool_choice",
    "include_reasoning",
    "add_generation_prompt",
    "continue_final_message",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
}
"""Those of the fields above that are honoured in chats."""

MAX_DIGITS: Final = 10
"""The most digits of a token's id."""


class StreamOptions(Contract, frozen=True):
    """include_usage: end the stream with a chunk that has the numbers of tokens and no choice. continuous_usage_stats:
    then every chunk has those so far, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(FormFields, frozen=True, kw_only=True):
    """The fields of OpenAI's APIs that say how to answer, with the names that vLLM added. None: not given.

    Bounds are those of disagg.api.Sampling, which AsyncClient applies. top_k -1 means all tokens, as in vLLM.
    repeat_penalty: another name of repetition_penalty. no_stop_trim: another one of include_stop_str_in_output.
    keep_alive: see `managing`; ttl: LM Studio's name of it.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    bad_words: str | tuple[str, ...] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    keep_alive: KeepAlive = None
    ttl: float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """How long the model stays loaded after the answer."""
        return keep_alive_s(self.ttl, "ttl") if self.keep_alive is None else keep_alive_s(self.keep_alive)

    def options(self, longest: int | None, *, lowered: bool = True) -> dict[str, Any]:
        """The options of AsyncClient.stream. longest: tokens of the answer, None if the request names no bound.
        lowered: see `answer_length`.

        OpenAI's temperature is 1 if the request does not set it.
        """
        given = {name: value for name in SAME_NAME if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.no_stop_trim:
            given["include_stop_str_in_output"] = True
        if self.repeat_penalty is not None:
            given.setdefault("repetition_penalty", self.repeat_penalty)
        if self.logit_bias:
            given["logit_bias"] = biases(self.logit_bias)
        return {"temperature": 1.0, **given, **answer_length(longest, lowered=lowered)}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_so_far(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


SAME_NAME: Final = {*SamplingFields.__struct_fields__} & {*Sampling.__struct_fields__} - {
    "max_tokens",
    "top_k",
    "logit_bias",
}
"""Fields of a request that are options of AsyncClient.stream as they are."""


def biases(given: Mapping[str, float]) -> list[tuple[int, float]]:
    """Token ids and what is added to their logits. Raises RequestError for a name that is no id."""
    for name in given:
        if not name.isdecimal() or len(name) > MAX_DIGITS:
            message = f"logit_bias: a name is not the id of a token (got {name[: MAX_DIGITS + 1]!r})"
            raise RequestError(message, "ask /tokenize for the ids of a text")
    return [(int(name), value) for name, value in given.items()]


def read(kind: type[Body], body: Mapping[str, Any], honoured: Collection[str], more: Refused) -> Body:
    """The fields that the gateway honours; raises RequestError for one that is wrong or that it cannot honour.

    honoured: of the fields that would change the answer. more: those of this call.
    """
    if body.get("stream_options") and not body.get("stream"):
        raise RequestError("stream_options: there is no stream", "set stream to true, or leave out stream_options")
    refused = {name: field for name, field in UNSUPPORTED.items() if name not in honoured}
    return read_fields(kind, body, {**refused, **more})


def require_listable(fields: SamplingFields) -> None:
    """Raise RequestError if the tokens of the prompt are to be listed in a stream."""
    if fields.prompt_logprobs is not None and fields.stream:
        raise RequestError("prompt_logprobs: a stream has none", "set stream to false")


def listed(prompt: ScoredPrompt, top: int) -> list[dict[str, Any] | None]:
    """The tokens of a prompt as vLLM lists them: each and the `top` likeliest ones there by their ids; None for the
    first one."""
    return [_listed(token, top) if token.logprob is not None else None for token in prompt.tokens]


def _listed(token: PromptToken, top: int) -> dict[str, Any]:
    likeliest = zip(token.top[:top], token.top_bytes[:top], strict=True)
    entries = {
        str(id): {"logprob": logprob, "rank": rank, "decoded_token": token_name(id, data)}
        for rank, ((id, logprob), data) in enumerate(likeliest, 1)
    }
    own = {"logprob": token.logprob, "rank": token.rank, "decoded_token": token_name(token.id, token.bytes)}
    return {str(token.id): own, **entries}


class OpenAIDialect:
    """What the dialects of OpenAI's API have in common."""

    framing: ClassVar = DATA_EVENTS

    def error(self, problem: Problem) -> Written:
        return error_body(problem)


class ObjectWriter:
    """Writes objects that have choices. prefix: of their ids. chunk: the kind of those of a stream."""

    prefix: ClassVar[str]
    chunk: ClassVar[str] = "text_completion"

    def __init__(self, head: Head) -> None:
        self._request = head.request
        self._logprobs = head.request.options.get("logprobs") is not None
        self._id = f"{self.prefix}-{head.request_id}"
        self._created, self._model = int(head.created), head.model
        self._fingerprint_of, self._host = head.fingerprint, ""
        self._prompts: dict[int, int] = {}  # tokens of each, as far as they are known
        self._tokens = 0  # of the answers so far

    def end(self, completions: Sequence[Completion]) -> Iterator[Written]:
        if self._request.include_usage:
            yield self._object(self.chunk, (), completions)

    def _note(self, piece: AnswerPiece) -> None:
        """Note what the chunks of a stream state of their request, but for the piece's tokens."""
        if piece.stage is not None:
            self._host = piece.stage.decode_server or piece.stage.prefill_server or ""
            self._prompts[piece.choice // self._request.n] = piece.stage.prompt_tokens

    def error(self, problem: Problem) -> Iterator[Written]:
        yield error_body(problem)

    def _object(
        self, kind: str, choices: Sequence[Written], completions: Sequence[Completion] | None = None
    ) -> Written:
        """completions: of the request, if the object has their numbers of tokens."""
        body = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": self._fingerprint(completions),
        }
        if completions is not None:
            return {**body, "usage": usage_body(completions, self._request.n)}
        return {**body, "usage": self._usage_so_far()} if self._request.usage_so_far else body

    def _fingerprint(self, completions: Sequence[Completion] | None) -> str | None:
        """Of the host that answers, or has answered."""
        for one in completions or ():
            self._host = one.metrics.decode_server or one.metrics.prefill_server or ""
        digest = self._fingerprint_of(self._host)
        return f"fp_{digest}" if digest else None

    def _usage_so_far(self) -> Written:
        prompt, answer = sum(self._prompts.values()), self._tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class ErrorFields(Contract, frozen=True):
    """What failed, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Contract, frozen=True):
    """An answer of OpenAI's API that is an error."""

    error: ErrorFields


def error_body(problem: Problem) -> dict[str, Any]:
    """The body of an answer that is an error."""
    return ErrorBody(ErrorFields(problem.message, problem.kind, problem.param, problem.code)).to_json()


def usage_body(completions: Sequence[Completion], n: int) -> dict[str, Any]:
    """The `usage` object of an answer."""
    usage = Usage.of(completions, n)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def disagg_body(completion: Completion) -> dict[str, Any]:
    """The `disagg` object: who answered, how, and where the time went. Seconds and bytes."""
    metrics = completion.metrics
    return {
        "method": metrics.method,
        "prefill_server": metrics.prefill_server,
        "decode_server": metrics.decode_server,
        "warnings": completion.warnings,
        "ttft": metrics.ttft,
        "ttft_parts": asdict(metrics.ttft_parts),
        "total_time": metrics.total_time,
        "hidden_transfer": metrics.hidden_transfer,
        "exposed_transfer": metrics.exposed_transfer,
        "kv_bytes": metrics.kv_bytes,
        "simulated": metrics.simulated,
    }


def token_name(token_id: int, data: bytes, *, ids: bool = False) -> str:
    """A token's text; of one that is a part of a character, what can be shown of it. Without its bytes, or if ids are
    wanted, its id as vLLM writes it."""
    return data.decode(errors="replace") if data and not ids else f"token_id:{token_id}"


class Alternative(NamedTuple):
    """One of the likeliest tokens. data: the bytes of its text."""

    name: str
    logprob: float
    data: bytes


def alternatives(token: TokenLogprob, *, ids: bool = False) -> list[Alternative]:
    """The likeliest alternatives of one token. ids: as names."""
    data = token.top_bytes or (b"",) * len(token.top)
    pairs = zip(token.top, data, strict=True)
    return [Alternative(token_name(id, one, ids=ids), logprob, one) for (id, logprob), one in pairs]


def logprob_body(token: TokenLogprob, *, ids: bool = False) -> dict[str, Any]:
    """One token of an answer, with its alternatives, as chats and responses write it. ids: as names."""
    top = [_named(one.name, one.logprob, one.data) for one in alternatives(token, ids=ids)]
    return {**_named(token_name(token.id, token.bytes, ids=ids), token.logprob, token.bytes), "top_logprobs": top}


def _named(name: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(data) if data else None}
