"""The options of a request in Python, and the request's body made from them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from disagg.api.base import InvalidValue, bounds
from disagg.api.requests import FORMS, GenerateBody, Messages, Split
from disagg.api.sampling import Sampling
from disagg.errors import RequestError
from disagg.inference.attempt import Alone
from disagg.inference.policy import OnKVFailure

_OF_THE_BODY = (
    "cache_salt",
    "share",
    "tools",
    "must_call",
    "parallel_tool_calls",
    *FORMS,
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "suffix",
    "hold_prompt",
    "split",
)
_PROMPTS = ("messages", "tokens")
_NOT_SAMPLING = ("alone", "timeout", "on_kv_failure", "local_prefill", *_PROMPTS, *_OF_THE_BODY)


class GenerateOptions(TypedDict, total=False):
    """The options of a request: those of `disagg.api.Sampling`, with its defaults and bounds, and nineteen more.

    stop, bad_words: one string or several. logit_bias: token id -> number, or pairs of both. alone: "decode" or
    "prefill" runs the request on one host of that role, without a hand-off, "whole" on a whole-request host; None by
    default. timeout: seconds until the request must have ended; 600 by default. on_kv_failure: what follows if no
    prefill host delivers the KV: "fallback", the default, lets the decode host compute the prompt, "fail" raises a
    HandoffError. local_prefill: whether the decode host may compute a short prompt itself if that takes less time than
    a hand-off; True by default. cache_salt: only requests with the same salt share KV that hosts hold; "" by default.
    share: whose share of the hosts the request counts for, {"key", "weight"}; by default that of all requests without
    a key.

    The rest are fields of `disagg.api.GenerateBody`. tools: each {"name", "description", "parameters"}. must_call:
    names of tools, one of which the answer calls. parallel_tool_calls: False: the answer has one call at most.
    json_schema: the answer is JSON that fits it. regex, choice, grammar: it matches this expression, is one of these
    texts, fits this grammar. chat_template_kwargs: further variables of the chat template. add_generation_prompt:
    False: a chat's prompt ends with its last message. continue_final_message: it ends within that, which the answer
    goes on with. suffix: what follows the gap after the prompt, which the answer fills. hold_prompt: more answers to
    this prompt follow. split: how many layers of the model a prefill host computes of the prompt, while the decode
    host computes the others: "auto", the default: as many as take the least time; "off": all; or a number.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    min_tokens: int
    bad_words: str | Sequence[str]
    logprobs: int | None
    fit_context: bool
    ignore_eos: bool
    alone: Alone | None
    timeout: float
    on_kv_failure: OnKVFailure
    local_prefill: bool
    cache_salt: str
    share: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    must_call: Sequence[str]
    parallel_tool_calls: bool
    json_schema: Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    suffix: str
    hold_prompt: bool
    split: Split


class RequestOptions(GenerateOptions, total=False):
    """GenerateOptions, and what may take the place of a prompt's text: chat messages, or token ids."""

    messages: Messages | None
    tokens: Sequence[int] | None


def request_body(model: str, prompt: str | None, options: RequestOptions) -> GenerateBody:
    """The request's body. RequestError names the option that is wrong."""
    fields: dict[str, Any] = {"model": model}
    prompts = {"prompt": prompt, **{name: options.get(name) for name in _PROMPTS}}
    fields |= {name: _as_json(value) for name, value in prompts.items() if value is not None}
    sampling = {name: _as_json(value) for name, value in options.items() if name not in _NOT_SAMPLING}
    for name in ("stop", "bad_words"):
        if isinstance(text := sampling.get(name), str):
            sampling[name] = [text]
    if sampling.get("temperature") and sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(63)  # so that any host can go on with the same draws
    if isinstance(bias := sampling.get("logit_bias"), Mapping):
        sampling["logit_bias"] = [list(pair) for pair in bias.items()]
    fields["sampling"] = sampling
    fields |= {name: _as_json(value) for name, value in options.items() if name in _OF_THE_BODY}
    if "timeout" in options:
        fields["deadline_s"] = _as_json(options["timeout"])
    try:
        body = GenerateBody.from_json(fields)
        msgspec.json.encode(body)
    except InvalidValue as error:
        message = str(error).removeprefix("sampling.").replace("deadline_s:", "timeout:", 1)
        raise RequestError(message, _option_hint(message)) from None
    except RecursionError:
        raise RequestError("the request is nested too deeply", "send fewer objects and lists in each other") from None
    except UnicodeEncodeError as error:  # such as a file name that a shell passed on
        raise RequestError(f"the request holds text that is not Unicode: {error.reason}") from None
    return body


def _option_hint(message: str) -> str:
    """The range of the option that the message of a validation error begins with; all names if it is unknown."""
    option, _, reason = message.partition(": ")
    known = GenerateOptions.__annotations__
    if reason == "unknown field":
        return f"the options are {', '.join(known)}"
    if option not in (*Sampling.__struct_fields__, "timeout"):
        return ""
    kind, field = (GenerateBody, "deadline_s") if option == "timeout" else (Sampling, option)
    text = bounds(kind, field).text
    return f"{option}: {text}" if text else ""


def _as_json(value: object) -> object:
    """Any sequence as a list and any kind of float, such as numpy's, as a float. Validation does the rest."""
    if isinstance(value, float):
        return float(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
