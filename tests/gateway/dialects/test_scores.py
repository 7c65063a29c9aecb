"""What /v1/completions states of a prompt: `echo` and `prompt_logprobs`."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from disagg.api.events import TokenLogprob
from disagg.errors import CapabilityMissing, RequestError
from disagg.gateway import run
from disagg.gateway.dialects import completions
from disagg.gateway.dialects.base import Head, Scoring
from disagg.gateway.dialects.completions import Completions
from disagg.http.stream import event_bytes
from tests.gateway.fake_client import FakeClient, app, completion, http

BODY: dict[str, Any] = {"model": "m", "prompt": "H\u00e4y"}
LIKELIEST = [None, {"i": -1.0, "\ufffd": -1.5}, {"\ufffdy": -0.25}]


async def answered(fields: dict[str, Any], *steps: Any) -> tuple[FakeClient, dict[str, Any]]:
    client = FakeClient(*steps)
    async with http(app(client)) as caller:
        return client, (await caller.post("/v1/completions", json=BODY | fields)).json()


@pytest.mark.parametrize(
    ("fields", "scoring"),
    [
        ({}, None),
        ({"echo": False}, None),
        ({"echo": True}, Scoring(echo=True, listed=None, top=None, alone=False)),
        ({"echo": True, "prompt": [7, 8]}, Scoring(echo=True, listed=None, top=0, alone=False)),
        ({"echo": True, "logprobs": 2}, Scoring(echo=True, listed=None, top=2, alone=False)),
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, Scoring(echo=True, listed=None, top=1, alone=True)),
        ({"echo": True, "max_tokens": 0}, Scoring(echo=True, listed=None, top=0, alone=True)),
        ({"logprobs": 5, "prompt_logprobs": 0}, Scoring(echo=False, listed=0, top=0, alone=False)),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, Scoring(echo=True, listed=3, top=3, alone=False)),
    ],
)
def test_the_prompt_is_scored_as_far_as_the_request_needs_it(fields: dict[str, Any], scoring: Scoring | None) -> None:
    assert Completions().read(BODY | fields).scoring == scoring


async def test_an_echoed_prompt_comes_before_its_answer_with_the_log_probabilities_of_both() -> None:
    client, body = await answered({"echo": True, "logprobs": 1, "max_tokens": 2}, "a", " b")
    (choice,) = body["choices"]
    assert choice["text"] == "H\u00e4ya b"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, -1.5, -0.25, -0.5, -0.5]
    assert logprobs["tokens"][:3] == ["H", "\ufffd", "\ufffdy"] and logprobs["text_offset"][:4] == [0, 1, 1, 3]
    assert logprobs["top_logprobs"][:3] == LIKELIEST and len(logprobs["top_logprobs"]) == 5
    assert [asked.get("top") for asked in client.asked] == [1, None], "scored, then answered"


async def test_what_a_tokenizer_puts_before_a_prompt_moves_no_offset() -> None:
    _, body = await answered({"prompt": "\u00e4y", "echo": True, "logprobs": 1, "max_tokens": 0})
    [choice] = body["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("\u00e4y", [0, 0, 0])


async def test_each_token_of_an_answer_has_its_own_offset() -> None:
    tokens = (TokenLogprob(1, -0.5, (), b"a"), TokenLogprob(2, -0.5, (), b"\xc3"), TokenLogprob(3, -0.5, (), b"\xa4y"))
    answer = replace(completion("a\u00e4y"), tokens=tokens, text="a\u00e4y")
    head = Head(Completions().read(BODY | {"logprobs": 0}), "r", 0.0)
    (choice,) = Completions().writer(head).whole([answer])["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]


async def test_without_an_answer_nothing_is_generated() -> None:
    client, body = await answered({"echo": True, "logprobs": 1, "max_tokens": 0})
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("H\u00e4y", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -0.25]
    assert (len(client.asked), len(client.streams)) == (1, 0)
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 0


async def test_the_text_of_an_echo_alone_needs_no_host() -> None:
    client, body = await answered({"echo": True, "max_tokens": 2}, "a")
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("H\u00e4ya", None)
    assert [asked.get("top") for asked in client.asked] == [None]


async def test_the_text_of_echoed_token_ids_is_that_of_their_bytes() -> None:
    _, body = await answered({"echo": True, "max_tokens": 1, "prompt": [7, 8, 10]}, "a")
    assert body["choices"][0]["text"] == "H\u00e4ya"


async def test_prompt_logprobs_are_listed_by_id_as_vllm_lists_them() -> None:
    _, body = await answered({"prompt_logprobs": 1, "max_tokens": 1}, "a")
    (choice,) = body["choices"]
    assert (choice["text"], choice["logprobs"]) == ("a", None)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": "\ufffd"},
            "9": {"logprob": -1.0, "rank": 1, "decoded_token": "i"},
        },
        {"10": {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffdy"}},
    ]


async def test_the_prompt_of_a_chat_is_listed_beside_its_answers() -> None:
    client, chat = FakeClient("a"), {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}
    async with http(app(client)) as caller:
        body = (await caller.post("/v1/chat/completions", json=chat | {"prompt_logprobs": 0})).json()
        plain = (await caller.post("/v1/chat/completions", json=chat)).json()
    assert [entry and [*entry] for entry in body["prompt_logprobs"]] == [None, ["8"], ["10"]]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "a"]
    assert plain["prompt_logprobs"] is None and sum("top" in asked for asked in client.asked) == 1


async def test_several_answers_share_the_scores_of_their_prompt() -> None:
    client, body = await answered({"echo": True, "logprobs": 0, "max_tokens": 1, "n": 2, "prompt": ["x", "y"]}, "a")
    assert [choice["text"] for choice in body["choices"]] == ["xa", "xa", "ya", "ya"]
    assert [choice["logprobs"]["token_logprobs"][:3] for choice in body["choices"]] == [[None, -1.5, -0.25]] * 4
    assert sum("top" in asked for asked in client.asked) == 2
    _, body = await answered({"echo": True, "max_tokens": 0, "n": 2})
    assert [choice["text"] for choice in body["choices"]] == ["H\u00e4y"] * 2


async def test_a_stream_begins_with_the_prompt() -> None:
    async with http(app(FakeClient("a"))) as caller:
        fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "stream": True}
        lines = (await caller.post("/v1/completions", json=BODY | fields)).content
    assert lines.count(b"data: ") == 4 and lines.startswith(event_bytes(b"")[:5])
    first = lines.split(b"\n\n")[0].decode()
    assert '"text":"H\u00e4y"' in first and '"token_logprobs":[null,-1.5,-0.25]' in first


async def test_a_model_that_no_host_can_score_is_refused_with_the_name_of_the_field() -> None:
    _, body = await answered({"echo": True, "logprobs": 1}, CapabilityMissing("the engine vllm scores no prompts", "x"))
    assert body["error"]["param"] == "echo" and body["error"]["code"] == "not_supported"
    _, body = await answered({"prompt_logprobs": 1}, CapabilityMissing("the engine vllm scores no prompts", "x"))
    assert body["error"]["param"] == "prompt_logprobs"


async def test_the_prompts_of_a_request_list_a_bounded_number_of_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "MAX_SCORES", 12)
    listed = {"echo": True, "logprobs": 1, "max_tokens": 0}
    _, body = await answered({**listed, "n": 2})
    assert len(body["choices"]) == 2
    for more in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
        _, body = await answered({**listed, **more})
        assert body["error"]["param"] == "logprobs" and "over 12" in body["error"]["message"]


async def test_scores_are_written_while_other_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[threading.Thread]()

    def noted(*arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return likeliest(*arguments)

    likeliest = completions._likeliest_there
    monkeypatch.setattr(completions, "_likeliest_there", noted)
    for stream in (False, True):
        async with http(app(FakeClient("a"))) as caller:
            fields = {"echo": True, "logprobs": 1, "stream": stream}
            assert (await caller.post("/v1/completions", json=BODY | fields)).status_code == 200
    assert threads and threading.main_thread() not in threads


async def test_too_many_alternatives_are_refused_with_the_name_of_the_field_that_asks_for_them() -> None:
    wrong = RequestError("top: 0 to 20 (got 21)", "lower it")
    _, body = await answered({"echo": True, "logprobs": 21}, wrong)
    assert body["error"]["param"] == "logprobs" and "top" not in body["error"]["message"]
    _, body = await answered({"prompt_logprobs": 20}, wrong)
    assert body["error"]["param"] == "prompt_logprobs"


async def test_two_requests_together_are_scored_as_alone() -> None:
    async with http(app(FakeClient("a"))) as caller:
        item = BODY | {"echo": True, "logprobs": 1, "max_tokens": 0}
        body = (await caller.post("/v1/parallel", json={"requests": [item, BODY]})).json()
    texts = [result["body"]["choices"][0]["text"] for result in body["results"]]
    assert texts == ["H\u00e4y", "a"]
