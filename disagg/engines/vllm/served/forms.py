"""Bodies and answers of POST /v1/completions of a `vllm serve`, with token ids both ways. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from disagg.api.base import InvalidValue
from disagg.api.delivery import ORDER_FIELD, OrderAnswer
from disagg.errors import DisaggError, ModelError, RequestError, clipped

COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
START_COMMAND: Final = (
    'vllm serve MODEL --kv-transfer-config \'{"kv_connector": "DisaggConnector", '
    '"kv_connector_module_path": "disagg.engines.vllm.connector", "kv_role": "kv_producer"}\''
)
_TOKEN_ID: Final = "token_id:"
_END: Final = b"[DONE]"
_BAD_REQUEST, _UNAUTHORIZED, _NOT_FOUND = 400, 401, 404


class Logprob(NamedTuple):
    """The log-probability of one token, as vLLM's own type has it."""

    logprob: float


class NewTokens(NamedTuple):
    """New tokens of an answer, in the form that AnswerRun takes them from vLLM. logprobs: those of the token and the
    likeliest ones, by id."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]]
    finish_reason: str | None


class StepOutput(NamedTuple):
    """What one step had for a request."""

    outputs: tuple[NewTokens]
    finished: bool


def prompt_body(model: str, tokens: Sequence[int], salt: str, order: Any) -> bytes:
    """The body of a request to compute a prompt. Its one token of answer, which vLLM cannot do without, is not used.
    order: a KVOrder as JSON, or DESCRIBE."""
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    return _body(model, tokens, salt, {**body, "kv_transfer_params": {ORDER_FIELD: order}})


def answer_body(model: str, tokens: Sequence[int], salt: str, sampling: Mapping[str, Any]) -> bytes:
    """The body of a request to compute a prompt and its answer, token by token. sampling: what `sampling.fields`
    gives."""
    bias = {str(id): value for id, value in (sampling["logit_bias"] or {}).items()}
    form = {"stream": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return _body(model, tokens, salt, {**sampling, "logit_bias": bias or None, **form})


def _body(model: str, tokens: Sequence[int], salt: str, more: Mapping[str, Any]) -> bytes:
    body = {"model": model, "prompt": list(tokens), "add_special_tokens": False, **more}
    if salt:
        body["cache_salt"] = salt
    return json.dumps(body).encode()


def order_answer(content: bytes) -> OrderAnswer | None:
    """What the connector answered; None if there is none. ModelError if this is no answer of vLLM."""
    params = _object(content).get("kv_transfer_params")
    if not isinstance(params, dict) or ORDER_FIELD not in params:
        return None
    try:
        return OrderAnswer.from_json(params[ORDER_FIELD])
    except InvalidValue as error:
        raise ModelError(f"the connector in vllm serve answered what cannot be read: {error}", _SAME_VERSION) from None


def finish_reason(content: bytes) -> str | None:
    """Why vLLM ended a request that is not streamed; None if that is not stated."""
    try:
        reason = _object(content)["choices"][0]["finish_reason"]
    except (KeyError, TypeError, IndexError):
        return None
    return None if reason is None else str(reason)


def model_names(content: bytes) -> list[str]:
    """The names in the answer to GET /v1/models, without those of adapters, which have a parent. ModelError if it is no
    such answer."""
    try:
        return [str(one["id"]) for one in _object(content)["data"] if not one.get("parent")]
    except (KeyError, TypeError, AttributeError):
        raise ModelError(f"this is no answer of vllm serve: {clipped(repr(content))}", _NOT_VLLM) from None


def output(line: bytes) -> StepOutput | None:
    """The tokens in one line of a streamed answer; None if it has none. Raises DisaggError for an error in it."""
    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
    if not data or data == _END:
        return None
    body = _object(data)
    if error := body.get("error"):
        raise ModelError(f"vllm serve ended the answer: {clipped(str(error))}", "see its log")
    try:
        choices = body["choices"]
        return StepOutput((_piece(choices[0]),), choices[0]["finish_reason"] is not None) if choices else None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise ModelError(f"this is no answer of vllm serve: {clipped(repr(data))}", _NOT_VLLM) from None


def _piece(choice: Mapping[str, Any]) -> NewTokens:
    ids = [int(id) for id in choice["token_ids"] or ()]
    given = choice["logprobs"] or {"token_logprobs": (), "top_logprobs": ()}
    logprobs = []
    for id, own, top in zip(ids, given["token_logprobs"], given["top_logprobs"], strict=True):
        likely = {int(name.removeprefix(_TOKEN_ID)): Logprob(value) for name, value in (top or {}).items()}
        logprobs.append({id: Logprob(own), **likely})
    return NewTokens(ids, logprobs, choice["finish_reason"])


def refusal(status: int, content: bytes) -> DisaggError:
    """An answer with another status than 200, as the error of the request."""
    try:
        error = _object(content).get("error")
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except ModelError:
        text = content.decode("utf-8", "replace")
    message = f"vllm serve answered HTTP {status}: {clipped(text)}"
    if status == _BAD_REQUEST:
        return RequestError(message, "see its log")
    if status == _UNAUTHORIZED:
        return ModelError(message, "check its key: engine.key_file or engine.key_variable in hosts.toml")
    return ModelError(message, "see its log")


def _object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ModelError(f"this is no answer of vllm serve: {clipped(repr(content))}", _NOT_VLLM)
    return body


_NOT_VLLM: Final = "correct the url in hosts.toml: another server may listen there"
_SAME_VERSION: Final = "install the same version of disagg on this host and in vLLM's environment"
