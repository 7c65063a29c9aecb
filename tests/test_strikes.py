"""Marks of requests, and what their strikes lead to."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.api.requests import DecodeBody, GenerateBody, KVAddress, PrefillBody
from disagg.api.status import Load
from disagg.errors import RequestEndedHosts
from disagg.strikes import Marks, StrikePolicy, Strikes, marks, require_innocent

TOKEN = "a token of the fleet that nobody guesses"
POLICY = StrikePolicy(strikes=2, refused_s=300.0, kept=4, computed=8)


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a secret prompt", "sampling": {"temperature": 1, "seed": 1}, **changes}


def marks_of(kind: type[GenerateBody] = GenerateBody, **changes: Any) -> Marks:
    return marks(kind.received(asked(**changes), "a caller"), TOKEN)


def test_a_caller_and_every_host_make_the_same_marks_of_a_request() -> None:
    sent = marks_of()
    assert marks(GenerateBody.from_bytes(GenerateBody.received(asked(), "a caller").to_bytes()), TOKEN) == sent
    later = {"deadline_s": 3, "lease_s": 2, "answer_tokens": [1, 2], "share": {"key": "k"}, "cache_salt": "s"}
    assert marks_of(DecodeBody, **later, elsewhere_s=1) == sent
    assert marks_of(sampling={"temperature": 1.0, "seed": 2}) == sent
    prefill = PrefillBody(model="m", prompt="a secret prompt", deliver=KVAddress("h", 1), ticket="12345678")
    assert marks(prefill, TOKEN) == Marks("", sent.prompt)
    assert sent.computed == (sent.request,) and Marks("", sent.prompt).computed == (sent.prompt,)


@pytest.mark.parametrize(
    ("changes", "same_prompt", "same_form"),
    [
        ({"prompt": "another one"}, False, True),
        ({"model": "n"}, False, True),
        ({"sampling": {"temperature": 1, "logit_bias": [[1, 2.0]]}}, True, True),
        ({"json_schema": {"type": "object"}}, True, False),
        ({"regex": "a+"}, True, False),
        ({"suffix": "and then"}, False, True),
    ],
    ids=["prompt", "model", "sampling", "form", "expression", "gap"],
)
def test_other_requests_have_other_marks(changes: dict[str, Any], same_prompt: bool, same_form: bool) -> None:
    one, other = marks_of(), marks_of(**changes)
    assert one.request != other.request
    assert ((one.prompt == other.prompt), (one.form == other.form)) == (same_prompt, same_form)


def test_requests_with_one_form_have_its_mark_in_common_and_marks_have_no_text() -> None:
    schema = {"type": "string", "pattern": "secret"}
    one, other = marks_of(json_schema=schema), marks_of(json_schema=schema, prompt="another one")
    assert one.form == other.form != "" and one.request != other.request
    assert all(len(mark) == 32 and set(mark) <= set("0123456789abcdef") for mark in one.computed)
    tool = {"name": "f", "parameters": schema}
    assert marks_of(tools=[tool]).form == "", "a tool that need not be called gives no form"
    assert marks_of(tools=[tool], must_call=["f"]).form != ""
    assert marks_of(tools=[tool], regex="a").form not in ("", marks_of(regex="a").form)
    chat: dict[str, Any] = {"prompt": None, "messages": [{"role": "assistant", "content": "It"}]}
    assert marks_of(**chat).prompt != marks_of(**chat, continue_final_message=True).prompt
    body = GenerateBody.received(asked(), "a caller")
    assert marks(body, TOKEN).prompt != marks(body, "another token that nobody guesses").prompt


def test_strikes_count_for_a_while_and_only_the_latest_are_kept() -> None:
    strikes = Strikes(POLICY)
    strikes.add(["a", "b"], now=1000.0)
    strikes.add(["a"], now=1100.0)
    assert strikes.stated(1101.0) == {"a": 2, "b": 1}
    strikes.add(["c", "d", "e"], now=1101.0)
    assert strikes.stated(1101.0) == {"a": 1, "c": 1, "d": 1, "e": 1}, "four are kept"
    assert strikes.stated(1400.5) == {"c": 1, "d": 1, "e": 1} and strikes.stated(1401.0) == {}


def test_each_time_that_a_host_has_computed_a_request_takes_one_of_its_strikes_back_before_or_after() -> None:
    strikes = Strikes(StrikePolicy(refused_s=300.0))
    strikes.computed(["often", "once"], now=990.0)
    strikes.computed(["often"], now=1000.0)
    for _ in range(2):
        strikes.add(["often", "once", "never"], now=1001.0)
    assert strikes.stated(1002.0) == {"once": 1, "never": 2}
    strikes.computed(["never"], now=1003.0)
    assert strikes.stated(1004.0) == {"once": 1, "never": 1}
    assert strikes.stated(1290.0) == {"often": 1, "once": 2, "never": 1}, "it counts as long as a strike"


def test_strikes_of_a_clock_that_was_wrong_do_not_count() -> None:
    known = [("future", 9e12), ("never", float("inf")), ("no number", float("nan")), ("set back", 1030.0)]
    assert Strikes(POLICY, known).stated(1000.0) == {"set back": 1}


@pytest.mark.parametrize(
    ("stated", "refused"),
    [
        ([], False),
        ([({"request": 1}, "")], False),
        ([({"request": 1}, ""), ({"form": 1}, "")], False),
        ([({"other": 9}, "")], False),
        ([({"request": 2}, "")], True),
        ([({"request": 1}, ""), ({}, ""), ({"request": 1}, "")], True),
        ([({"request": 1}, ""), ({"prompt": 1}, "")], True),
        ([({"form": 1}, ""), ({"form": 1}, "")], True),
        ([({"request": 2}, ""), ({}, "request")], False),
        ([({"request": 2}, "prompt"), ({}, "form")], True),
        ([({"form": 2}, ""), ({}, "form")], False),
    ],
    ids=str,
)
def test_two_strikes_of_a_request_or_of_its_form_refuse_it_unless_a_host_has_computed_it_since(
    stated: list[tuple[dict[str, int], str]], refused: bool
) -> None:
    """By the hosts that state them: one, or several, each with the mark that it acquits."""
    of = Marks("request", "prompt", "form")
    loads = [Load("ok", boot_id="b", strikes=strikes, acquitted=(mark,) if mark else ()) for strikes, mark in stated]
    if refused:
        with pytest.raises(RequestEndedHosts, match="x ended while computing this request: it is refused for 300 s"):
            require_innocent(of, loads, POLICY, "x")
    else:
        has_strikes = any("other" not in strikes for strikes, _ in stated if strikes)
        assert require_innocent(of, loads, POLICY, "x") == has_strikes


def test_strikes_that_a_caller_has_seen_computed_as_often_refuse_nothing() -> None:
    of, loads = Marks("request", "prompt"), [Load("ok", boot_id="b", strikes={"request": 2, "prompt": 1})]
    assert require_innocent(of, loads, POLICY, "x", {"request": 1, "prompt": 1}), "it has strikes, and is not refused"
    for computed in ({}, {"request": 1}, {"prompt": 9}):
        with pytest.raises(RequestEndedHosts):
            require_innocent(of, loads, POLICY, "x", computed)


def test_suspects_that_were_computed_are_acquitted_as_long_as_a_strike_counts_and_only_the_latest_are() -> None:
    strikes = Strikes(POLICY)
    strikes.computed(["a", "b"], now=1000.0, suspect=True)
    strikes.computed(["c", "d", "e", "b"], now=1100.0, suspect=True)
    strikes.computed(["x"], now=1100.0)
    assert strikes.acquitted(1100.0) == ("c", "d", "e", "b")
    assert strikes.acquitted(1401.0) == ()


def test_a_host_that_ends_with_what_it_has_acquitted_as_often_as_it_has_computed_it_acquits_it_no_longer() -> None:
    strikes = Strikes(POLICY)
    strikes.computed(["a"], now=1000.0, suspect=True)
    strikes.add(["a"], now=1001.0)
    assert strikes.acquitted(1002.0) == ()
    strikes.computed(["a"], now=1003.0)
    assert strikes.acquitted(1004.0) == ("a",)
