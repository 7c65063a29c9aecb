"""disagg/engines/vllm/served/forms.py: what is sent to `vllm serve`, and what its answers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.api.delivery import ORDER_FIELD, OrderAnswer
from disagg.api.sampling import Sampling
from disagg.engines.base import AnswerRequest
from disagg.engines.vllm.sampling import fields
from disagg.engines.vllm.served.forms import (
    START_COMMAND,
    Logprob,
    answer_body,
    finish_reason,
    model_names,
    order_answer,
    output,
    prompt_body,
    refusal,
)
from disagg.errors import ModelError, RequestError
from tests.engines.vllm.served.fake_serve import completed


def test_a_prompt_is_sent_as_it_is_with_its_order_and_its_salt() -> None:
    body = json.loads(prompt_body("tiny", [5, 6], "salt", {"id": "secret"}))
    assert (body["model"], body["prompt"], body["cache_salt"]) == ("tiny", [5, 6], "salt")
    assert body["kv_transfer_params"] == {ORDER_FIELD: {"id": "secret"}}
    assert (body["max_tokens"], body["ignore_eos"], body["add_special_tokens"]) == (1, True, False)
    assert "cache_salt" not in json.loads(prompt_body("tiny", [5], "", {}))


def test_an_answer_states_all_of_its_sampling_so_that_no_default_of_the_server_applies() -> None:
    sampling = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, seed=3, logit_bias=((7, 2.0),), logprobs=2)
    sampling = msgspec.structs.replace(sampling, stop_token_ids=(8,), min_tokens=6)
    body = json.loads(answer_body("tiny", [5], "", fields(AnswerRequest([5], sampling, 4), {2, 1})))
    stated = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"}
    assert stated | {"frequency_penalty", "seed", "logprobs", "stop_token_ids", "ignore_eos"} <= body.keys()
    assert (body["max_tokens"], body["logit_bias"], body["stop_token_ids"]) == (5, {"7": 2.0}, [1, 2, 8])
    assert (body["min_tokens"], body["bad_words"]) == (2, [])
    assert body["stream"] and body["return_token_ids"] and body["return_tokens_as_token_ids"]


def chunk(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


def test_the_tokens_of_a_streamed_answer_come_with_their_likeliest_others() -> None:
    logprobs = {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}],
    }
    found = output(chunk(token_ids=[7], logprobs=logprobs, finish_reason="length"))
    assert found is not None and found.finished
    (piece,) = found.outputs
    assert (piece.token_ids, piece.finish_reason) == ([7], "length")
    assert piece.logprobs == [{7: Logprob(-0.5), 9: Logprob(-1.5)}]


@pytest.mark.parametrize("line", [b"\n", b": ping\n", b"data: [DONE]\n", b'data: {"choices": []}\n'])
def test_other_lines_of_a_streamed_answer_have_no_tokens(line: bytes) -> None:
    assert output(line) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'data: {"error": {"message": "out of memory"}}\n', "vllm serve ended the answer: .*out of memory"),
        (b"data: nonsense\n", "no answer of vllm serve"),
        (b'data: {"choices": [{"text": "a"}]}\n', "no answer of vllm serve"),
        (chunk(token_ids=[7], logprobs=None, finish_reason=None), "no answer of vllm serve"),
    ],
)
def test_an_error_or_another_servers_answer_ends_the_answer(line: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        output(line)


@pytest.mark.parametrize(
    ("connector", "answer"),
    [
        (None, None),
        ({}, None),
        (OrderAnswer().to_json(), OrderAnswer()),
        ({"error": {"message": "no"}}, OrderAnswer(error={"message": "no"})),
    ],
)
def test_the_connectors_answer_is_read_from_vllms(connector: Any, answer: OrderAnswer | None) -> None:
    assert order_answer(completed(connector)) == answer


def test_the_command_in_the_documentation_is_the_one_that_messages_state() -> None:
    text = Path(__file__).parents[4].joinpath("docs/vllm.md").read_text("utf-8")
    assert START_COMMAND[START_COMMAND.index("--kv-transfer-config") :] in text


def test_an_answer_of_another_connector_version_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be read") as caught:
        order_answer(completed({"error": 7}))
    assert "same version of disagg" in caught.value.hint


def test_an_adapter_is_no_model_to_order_from() -> None:
    models = [{"id": "tiny", "parent": None}, {"id": "adapter", "parent": "tiny"}]
    assert model_names(json.dumps({"data": models}).encode()) == ["tiny"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"choices": [{"finish_reason": "abort"}]}', "abort"),
        (b'{"choices": []}', None),
        (b"{}", None),
        (b'{"choices": [{"finish_reason": null}]}', None),
    ],
)
def test_the_reason_for_the_end_of_a_request_is_read_if_it_is_there(content: bytes, reason: str | None) -> None:
    assert finish_reason(content) == reason


@pytest.mark.parametrize(
    "content", [b"<html>", b"[]", b'{"data": 5}', b'{"data": [{}]}', b'{"data": [5]}', b"\xff", b"[" * 200_000]
)
def test_what_is_no_list_of_models_is_no_vllm_serve(content: bytes) -> None:
    with pytest.raises(ModelError, match="no answer of vllm serve"):
        model_names(content)


@pytest.mark.parametrize(
    ("status", "content", "kind", "text"),
    [
        (400, b'{"error": {"message": "too long"}}', RequestError, "HTTP 400: too long"),
        (401, b'{"error": "Unauthorized"}', ModelError, "HTTP 401: Unauthorized"),
        (500, b"oops", ModelError, "HTTP 500: oops"),
    ],
)
def test_a_refusal_says_what_vllm_said(status: int, content: bytes, kind: type[Exception], text: str) -> None:
    error = refusal(status, content)
    assert type(error) is kind and text in error.message
