"""What the OpenAI dialects share: sampling fields, fields that are refused, errors, usage, server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.events import TokenLogprob
from disagg.gateway.dialects.base import Body, read_fields
from disagg.gateway.events import Usage
from disagg.gateway.problems import Problem
from disagg.gateway.request import MAX_CHOICES, answer_length
from disagg.inference.types import Completion

SSE: Final = "text/event-stream"
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    # the form of the answer
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "no_stop_trim": (False,),
    # which tokens are chosen
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    # how the prompt is rendered
    "reasoning_effort": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "web_search_options": (),
}
"""Fields that would change the answer and cannot be honoured, with the values besides null that change nothing."""


class StreamOptions(Contract, frozen=True):
    """include_usage: end the stream with a chunk that has the numbers of tokens and no choice."""

    include_usage: bool | None = None


class SamplingFields(Contract, frozen=True, kw_only=True):
    """The fields of /chat/completions and /completions that say how to answer. None: not given.

    Bounds are those of disagg.api.Sampling, which AsyncClient applies. top_k -1 means all tokens, as in vLLM.
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
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    ignore_eos: bool | None = None

    def options(self, longest: int | None) -> dict[str, Any]:
        """The options of AsyncClient.stream. longest: tokens of the answer, None if the request names no bound.

        OpenAI's temperature is 1 if the request does not set it.
        """
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        return {"temperature": 1.0, **given, **answer_length(longest)}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def read(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """The fields that the gateway honours; raises RequestError for one that is wrong or that it cannot honour."""
    return read_fields(kind, body, HARMLESS)


def error_body(problem: Problem) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`"""
    fields = {"message": problem.message, "type": problem.kind, "param": problem.param, "code": problem.code}
    return {"error": fields}


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage_body(completions: Sequence[Completion], n: int) -> dict[str, Any]:
    """The `usage` object of an answer."""
    usage = Usage.of(completions, n)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
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


def token_name(token_id: int) -> str:
    """A token's name by its id, as in vLLM with return_tokens_as_token_ids: only the hosts have a tokenizer."""
    return f"token_id:{token_id}"


def alternatives(token: TokenLogprob) -> list[tuple[str, float]]:
    """The likeliest alternatives of one token: name and log-probability."""
    return [(token_name(token_id), logprob) for token_id, logprob in token.top]
