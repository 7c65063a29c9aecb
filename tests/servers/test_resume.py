"""An answer that goes on after tokens that another host has sent: no token and no text is lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.fleets import RunningFleet

PROMPT = "def quicksort(items):\n    if"
SAMPLINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 24},
    "sampled": {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalised": {"max_tokens": 24, "temperature": 0.8, "repetition_penalty": 1.3, "seed": 8},
}


class Received:
    """An answer as its caller has it: token ids, text, and the events."""

    def __init__(self, text: str) -> None:
        lines = iter(text.splitlines())
        self.events = [(line[7:], json.loads(next(lines)[6:])) for line in lines if line.startswith("event: ")]
        self.ids = [token["id"] for event in self.tokens for token in event["tokens"]]
        self.text = "".join(event["text"] for event in self.tokens)

    @property
    def tokens(self) -> Iterator[dict[str, Any]]:
        return (body for name, body in self.events if name == "tokens")

    @property
    def done(self) -> dict[str, Any]:
        name, body = self.events[-1]
        assert name == "done", self.events
        return dict(body)


def ask(
    fleet: RunningFleet,
    sampling: Mapping[str, Any],
    given: list[int] | None = None,
    host: str = "tiny-decode",
    **more: Any,
) -> Received:
    body = {"model": "tiny", "prompt": PROMPT, "sampling": sampling, "answer_tokens": given or [], **more}
    with fleet.http(host) as http:
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return Received(answer.text)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_goes_on_after_any_of_its_tokens(tiny_fleet: RunningFleet, name: str) -> None:
    sampling = {**SAMPLINGS[name], "ignore_eos": True}
    whole = ask(tiny_fleet, sampling)
    assert len(whole.ids) == 24
    for count in (1, 7, 23):
        rest = ask(tiny_fleet, sampling, whole.ids[:count])
        assert rest.ids == whole.ids[count:]
        assert whole.text.endswith(rest.text)
        assert rest.done["completion_tokens"] == 24 and rest.done["finish_reason"] == "length"
        assert rest.done["prompt_tokens"] == whole.done["prompt_tokens"]


def test_an_answer_that_is_whole_already_ends_at_once_without_tokens(tiny_fleet: RunningFleet) -> None:
    sampling = SAMPLINGS["sampled"]
    whole = ask(tiny_fleet, {**sampling, "ignore_eos": True})
    again = ask(tiny_fleet, {**sampling, "ignore_eos": True}, whole.ids)
    assert [name for name, _ in again.events] == ["done"]
    assert again.done["completion_tokens"] == 24 and again.done["computed_prompt_tokens"] == 0


def test_an_answer_with_what_clients_of_vllm_ask_for_goes_on_on_any_host(tiny_fleet: RunningFleet) -> None:
    sampled = {"max_tokens": 40, "temperature": 0.9, "seed": 11}
    free = ask(tiny_fleet, {**sampled, "ignore_eos": True})
    stop_token, stop_text = free.ids[20], free.text[30:33]
    word = next(text for text in free.text.split() if len(text) > 2)
    cases: list[dict[str, Any]] = [
        {"min_tokens": 30, "stop": [stop_text]},
        {"stop_token_ids": [stop_token], "min_tokens": 4},
        {"stop_token_ids": [stop_token], "include_stop_str_in_output": True, "ignore_eos": True},
        {"stop": [stop_text], "include_stop_str_in_output": True},
        {"bad_words": [word, free.text[:2]], "ignore_eos": True},
    ]
    for extra in cases:
        whole = ask(tiny_fleet, {**sampled, **extra})
        assert len(whole.ids) >= extra.get("min_tokens", 0)
        if "stop_token_ids" in extra and stop_token in whole.ids:
            assert whole.ids[-1] == stop_token and whole.done["finish_reason"] == "stop"
        if extra.get("stop") and extra.get("include_stop_str_in_output"):
            assert whole.text.endswith(stop_text)
        if "bad_words" in extra:
            assert word not in whole.text.split() and word in free.text.split()
        for host in ("tiny-decode", "tiny-prefill"):
            for count in (0, 1, len(whole.ids) - 1):
                rest = ask(tiny_fleet, {**sampled, **extra}, whole.ids[:count], host)
                assert rest.ids == whole.ids[count:] and whole.text.endswith(rest.text)
                assert rest.done["finish_reason"] == whole.done["finish_reason"]


def test_an_answer_that_goes_on_with_a_message_goes_on_on_any_host(tiny_fleet: RunningFleet) -> None:
    chat = [{"role": "user", "content": "def add(a, b):"}, {"role": "assistant", "content": "    return "}]
    sampling = {"max_tokens": 16, "temperature": 0.9, "seed": 2, "ignore_eos": True}
    asked: dict[str, Any] = {"prompt": None, "messages": chat, "continue_final_message": True}
    whole = ask(tiny_fleet, sampling, **asked)
    for host in ("tiny-decode", "tiny-prefill"):
        rest = ask(tiny_fleet, sampling, whole.ids[:5], host, **asked)
        assert rest.ids == whole.ids[5:] and whole.text.endswith(rest.text)


FORMS: Mapping[str, dict[str, Any]] = {
    "regex": {"regex": r"[a-z]{3,8} = [0-9]{3,8};"},
    "choice": {"choice": ["return left + right", "return left - right"]},
    "grammar": {"grammar": 'start: "[" WORD ("," WORD){3} "]"\nWORD: /[a-z]{1,4}/'},
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_a_form_goes_on_on_any_host(tiny_fleet: RunningFleet, form: str) -> None:
    sampling = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    whole = ask(tiny_fleet, sampling, **FORMS[form])
    assert whole.done["finish_reason"] == "stop" and len(whole.ids) > 6
    for host in ("tiny-decode", "tiny-prefill"):
        for count in (0, 1, 5):
            rest = ask(tiny_fleet, sampling, whole.ids[:count], host, **FORMS[form])
            assert rest.ids == whole.ids[count:] and whole.text.endswith(rest.text)
            assert rest.done["finish_reason"] == "stop"


def test_the_answers_tokens_are_checked_and_named(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.http("tiny-decode") as http:
        refused = http.post("/generate", json={"model": "tiny", "prompt": PROMPT, "answer_tokens": [1 << 30]})
    assert refused.status_code == 400
    assert "answer_tokens[0] is token 1073741824" in refused.json()["error"]["message"]


def test_counters_count_only_what_this_host_has_generated(tiny_fleet: RunningFleet) -> None:
    whole = ask(tiny_fleet, {**SAMPLINGS["greedy"], "ignore_eos": True})
    before = tiny_fleet.status("tiny-decode")["counters"]
    ask(tiny_fleet, {**SAMPLINGS["greedy"], "ignore_eos": True}, whole.ids[:20])
    after = tiny_fleet.status("tiny-decode")["counters"]
    assert after["completion_tokens"] - before["completion_tokens"] == 4
    assert after["prompt_tokens"] - before["prompt_tokens"] == whole.done["prompt_tokens"]
