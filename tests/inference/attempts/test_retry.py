"""The retry policy, read as tables: no server runs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    DisaggError,
    HandoffError,
    KVMemoryExceeded,
    ModelError,
    Overloaded,
    PeerLost,
    ServerNotRunning,
    ServerRefused,
    ServerSilent,
    ServerUnavailable,
    UnknownModel,
)
from disagg.inference.attempt import Alone, Attempt
from disagg.inference.attempts.retry import Failure, Pause, after, attempts, remaining
from disagg.inference.hosts.route import Candidates, Choice, Ranking
from disagg.inference.policy import DEFAULT_POLICY, RetryPolicy

LOST, BUSY, SILENT, DOWN = PeerLost("lost"), Overloaded("full"), ServerSilent("silent"), ServerUnavailable("gone")
STOPPED = ServerNotRunning("nothing listens")
WRONG, CANCELLED = ContextLengthExceeded("too long"), Cancelled("the engine is closed")
ENGINE, LARGE = ModelError("out of memory"), KVMemoryExceeded("needs 2 bytes, has 1")
FAIL = RetryPolicy(on_kv_failure="fail")
Side = Literal["prefill", "decode"]


def host(name: str) -> Host:
    return Host(name, "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 1)


def hosts(names: str) -> tuple[Host, ...]:
    return tuple(map(host, names.split()))


def with_first_layers(one: Host) -> Host:
    return replace(one, engine=replace(one.engine, layers="0:2"))


def choices(names: str) -> tuple[Choice, ...]:
    return tuple(Choice(one, {}) for one in hosts(names))


def route(
    decode: str, prefill: str, alone: Alone | None = None, *, waits: str = "", handed_off: bool = True
) -> Ranking:
    """waits: "prefill" or "decode" if a host of that role is loading."""
    loading = {f"{waits[0]}9": "loading"} if waits else {}
    of_decode, of_prefill = (f"{up} {role[0]}9" for role, up in (("decode", decode), ("prefill", prefill)))
    serving = Candidates("m", hosts(of_decode), hosts(of_prefill) if handed_off else (), alone)
    return Ranking(serving, choices(decode), choices(prefill), loading)


def row(attempt: Attempt) -> str:
    prefill = attempt.prefill.name if attempt.prefill else "-"
    return f"{attempt.method} {prefill} {attempt.decode.name if attempt.decode else '-'}"


def test_every_attempt_of_a_route_in_order_and_why() -> None:
    table = attempts(route("d1 d2", "p1 p2 p3"), RetryPolicy())
    assert [f"{row(attempt)}: {attempt.reason}" for attempt in table] == [
        "disaggregated p1 d1: first choice",
        "disaggregated p2 d1: prefill failed",
        "fallback - d1: prefill failed",
        "disaggregated p1 d2: decode host failed",
        "disaggregated p2 d2: prefill failed",
        "fallback - d2: prefill failed",
        "prefill-alone p1 -: no decode host is left",
        "prefill-alone p2 -: no decode host is left",
        "prefill-alone p3 -: no decode host is left",
    ]


def test_a_host_with_the_first_layers_only_is_asked_for_prompts_and_for_no_answer() -> None:
    both = route("d1", "p1 p2")
    p1, p2 = both.prefill
    ranking = replace(both, prefill=(replace(p1, host=with_first_layers(p1.host)), p2))
    assert [row(attempt) for attempt in attempts(ranking, RetryPolicy())] == [
        "disaggregated p1 d1",
        "disaggregated p2 d1",
        "fallback - d1",
        "prefill-alone p2 -",
    ]


@pytest.mark.parametrize(
    ("which", "policy", "expected"),
    [
        (route("d1", "p1"), RetryPolicy(), ["disaggregated p1 d1"] * 2 + ["fallback - d1", "prefill-alone p1 -"]),
        (route("d1", "p1"), FAIL, ["disaggregated p1 d1"] * 2 + ["prefill-alone p1 -"]),
        (route("d1", ""), RetryPolicy(), ["fallback - d1"]),
        (route("d1", ""), FAIL, []),
        (route("d1 d2", "", "decode", handed_off=False), RetryPolicy(), ["decode-alone - d1", "decode-alone - d2"]),
        (route("", "p1 p2", "prefill"), RetryPolicy(), ["prefill-alone p1 -", "prefill-alone p2 -"]),
    ],
)
def test_small_routes(which: Ranking, policy: RetryPolicy, expected: Sequence[str]) -> None:
    assert [row(attempt) for attempt in attempts(which, policy)] == expected


def performed(
    which: Ranking, outcomes: Sequence[tuple[Side, DisaggError]], policy: RetryPolicy = DEFAULT_POLICY
) -> tuple[list[str], list[Failure]]:
    """The attempts that are performed if they fail in this way, one after the other, and the next one answers."""
    failures: list[Failure] = []
    rows: list[str] = []
    for attempt in remaining(which, policy, failures):
        if len(failures) == len(outcomes):
            return [*rows, row(attempt)], failures
        side, error = outcomes[len(failures)]
        failures.append(Failure(attempt, side, error))
        rows.append(row(attempt))
    return [*rows, "none"], failures


P1D1, P2D1, P1D2, P2D2 = (f"disaggregated {pair}" for pair in ("p1 d1", "p2 d1", "p1 d2", "p2 d2"))


@pytest.mark.parametrize(
    ("prefill", "outcomes", "expected"),
    [
        ("p1 p2", [], [P1D1]),
        ("p1 p2", [("prefill", LOST)], [P1D1, P2D1]),
        ("p1", [("prefill", LOST)], [P1D1, P1D1]),
        ("p1", [("prefill", SILENT)], [P1D1, "fallback - d1"]),
        ("p1", [("prefill", LOST)] * 2, [P1D1, P1D1, "fallback - d1"]),
        ("p1", [("prefill", WRONG)], [P1D1, "fallback - d1"]),
        ("p1 p2", [("prefill", WRONG)], [P1D1, P2D1]),
        ("p1 p2", [("prefill", WRONG)] * 2, [P1D1, P2D1, "fallback - d1"]),
        ("p1", [("decode", CANCELLED)], [P1D1, P1D2]),
        ("p1", [("prefill", BUSY)], [P1D1, "none"]),
        ("p1 p2", [("prefill", BUSY)], [P1D1, P2D1]),
        ("p1 p2", [("prefill", BUSY), ("prefill", LOST)], [P1D1, P2D1, P2D2]),
        ("p1 p2", [("decode", DOWN)], [P1D1, P1D2]),
        ("p1 p2", [("decode", ENGINE)], [P1D1, P1D2]),
        ("p1 p2", [("decode", DisaggError("bug"))], [P1D1, P1D2]),
        ("p1 p2", [("decode", SILENT)], [P1D1, P1D2]),
        ("p1", [("decode", LARGE)], [P1D1, P1D2]),
        ("p1", [("decode", LARGE)] * 2, [P1D1, P1D2, "none"]),
        ("p1 p2", [("prefill", SILENT), ("decode", BUSY)], [P1D1, P2D1, P2D2]),
        ("p1", [("prefill", LOST)] * 2 + [("decode", DOWN)], [P1D1, P1D1, "fallback - d1", "fallback - d2"]),
        ("p1", [("decode", DOWN)] * 2, [P1D1, P1D2, "prefill-alone p1 -"]),
        ("p1", [("decode", DOWN), ("decode", BUSY)], [P1D1, P1D2, "none"]),
        ("p1", [("decode", DOWN)] * 2 + [("prefill", DOWN)], [P1D1, P1D2, "prefill-alone p1 -", "none"]),
        ("p1", [("prefill", LOST), ("decode", DOWN), ("decode", DOWN)], [P1D1, P1D1, P1D2, "prefill-alone p1 -"]),
    ],
)
def test_what_follows_which_failure(
    prefill: str, outcomes: Sequence[tuple[Side, DisaggError]], expected: Sequence[str]
) -> None:
    assert performed(route("d1 d2", prefill), outcomes)[0] == expected


def test_a_loading_prefill_host_is_waited_for_not_replaced() -> None:
    assert performed(route("d1", "", waits="prefill"), [])[0] == ["none"]


def test_a_loading_decode_host_is_waited_for_before_a_prefill_host_answers_alone() -> None:
    assert performed(route("", "p1", waits="decode"), [])[0] == ["none"]
    assert performed(route("", "p1"), [])[0] == ["prefill-alone p1 -"]


@pytest.mark.parametrize(
    ("which", "outcomes", "expected"),
    [
        (route("d1", "p1"), [("prefill", BUSY)], "p1 is busy (full); until the deadline"),
        (route("d1", "p1"), [("decode", BUSY)], "d1 is busy (full); until the deadline"),
        (route("", "", waits="decode"), [], "d9 is loading; until the deadline"),
        (route("d1", "", waits="prefill"), [], "p9 is loading; until the deadline"),
        (route("", ""), [], "no decode host of m is up; for a while"),
        (route("", "", "prefill"), [], "no prefill host of m is up; for a while"),
        (route("d1", ""), [("decode", DOWN)], "no decode host of m is up; for a while"),
        (route("d1", ""), [("decode", CANCELLED)], "no decode host of m is up; for a while"),
        (route("d1", "p1"), [("decode", DOWN), ("prefill", DOWN)], "no decode host of m is up; for a while"),
        (
            route("d1", "p1"),
            [("prefill", LOST), ("prefill", LOST), ("decode", DOWN), ("prefill", DOWN)],
            "no decode host of m is up; for a while",
        ),
    ],
)
def test_what_is_waited_for_when_no_attempt_is_left(
    which: Ranking, outcomes: Sequence[tuple[Side, DisaggError]], expected: str
) -> None:
    rows, failures = performed(which, outcomes)
    assert rows[-1] == "none"
    pause = after(which, RetryPolicy(), failures)
    reason = f"{pause.reason} ({pause.detail})" if pause.detail else pause.reason
    assert f"{reason}; {'for a while' if pause.limited else 'until the deadline'}" == expected


def test_a_busy_host_is_asked_again_when_it_said() -> None:
    busy, busier = Overloaded("full"), Overloaded("fuller")
    busy.retry_after_s, busier.retry_after_s = 3, 9
    _, failures = performed(route("d1", "p1 p2"), [("prefill", busier), ("prefill", busy)])
    pause = after(route("d1", "p1 p2"), RetryPolicy(), failures)
    assert isinstance(pause, Pause) and pause.seconds == 3
    assert isinstance(pause.error, Overloaded) and "fuller; full" in pause.error.message


@pytest.mark.parametrize(
    ("policy", "outcomes", "kind", "message"),
    [
        (
            RetryPolicy(),
            [("decode", ENGINE), ("prefill", DOWN)],
            ServerUnavailable,
            "Decode server unavailable - request failed: out of memory; gone",
        ),
        (FAIL, [("prefill", LOST), ("prefill", DOWN)], HandoffError, "the KV hand-off failed: lost; gone"),
        (FAIL, [("prefill", SILENT)], HandoffError, "the KV hand-off failed: silent"),
    ],
)
def test_the_error_when_waiting_does_not_help(
    policy: RetryPolicy, outcomes: Sequence[tuple[Side, DisaggError]], kind: type[DisaggError], message: str
) -> None:
    rows, failures = performed(route("d1", "p1"), outcomes, policy)
    assert rows[-1] == "none"
    with pytest.raises(kind) as raised:
        after(route("d1", "p1"), policy, failures)
    assert type(raised.value) is kind and raised.value.message == message


@pytest.mark.parametrize(
    ("unseen", "outcomes", "waited_for"),
    [
        ("d1 p1", [("decode", STOPPED), ("prefill", STOPPED)], False),
        ("d1 p1", [("decode", STOPPED), ("prefill", DOWN)], True),
        ("d1 p1 p2", [("decode", STOPPED), ("prefill", STOPPED)], True),
        ("", [("decode", STOPPED), ("prefill", STOPPED)], True),
    ],
    ids=["nothing listens on any host", "a host may be up", "a host was not tried", "a host has answered before"],
)
def test_a_fleet_that_is_not_started_is_not_waited_for(
    unseen: str, outcomes: Sequence[tuple[Side, DisaggError]], waited_for: bool
) -> None:
    which = replace(route("d1", "p1"), unseen=frozenset(unseen.split()))
    rows, failures = performed(which, outcomes)
    assert rows[-1] == "none"
    if waited_for:
        assert after(which, RetryPolicy(), failures).limited
        return
    with pytest.raises(ServerUnavailable, match="Decode server unavailable - request failed: nothing listens"):
        after(which, RetryPolicy(), failures)


@pytest.mark.parametrize(("refused", "waited_for"), [("d1 p1", False), ("d1", True)])
def test_a_fleet_of_which_every_host_is_known_to_be_stopped_is_not_waited_for(refused: str, waited_for: bool) -> None:
    """No attempt is left to show it: the hosts count as down."""
    names = frozenset({"d1", "p1"})
    stopped = replace(route("", ""), unseen=names, refused=frozenset(refused.split()))
    if waited_for:
        assert after(stopped, RetryPolicy(), []).limited
        return
    with pytest.raises(ServerUnavailable) as raised:
        after(stopped, RetryPolicy(), [])
    assert raised.value.hint == "the fleet is not started: run `disagg start`"


@pytest.mark.parametrize(
    ("error", "side", "final"),
    [
        (DOWN, "decode", False),
        (BUSY, "decode", False),
        (ENGINE, "decode", False),
        (LOST, "prefill", False),
        (DisaggError(""), "decode", False),
        (LARGE, "decode", False),
        (WRONG, "decode", True),
        (WRONG, "prefill", False),
        (UnknownModel(""), "prefill", False),
        (CANCELLED, "decode", False),
        (CANCELLED, "prefill", False),
        (DeadlineExceeded(""), "decode", True),
        (DeadlineExceeded(""), "prefill", True),
    ],
)
def test_which_failures_are_the_requests_own(error: DisaggError, side: Side, final: bool) -> None:
    assert Failure(Attempt("disaggregated", host("d1"), host("p1")), side, error).final is final


def test_a_request_that_a_prefill_host_alone_was_to_answer_is_wrong_if_that_host_finds_so() -> None:
    assert Failure(Attempt("prefill-alone", None, host("p1")), "prefill", WRONG).final


def test_a_request_that_is_too_large_for_every_decode_host_fails_as_such() -> None:
    which = route("d1 d2", "p1")
    _, failures = performed(which, [("decode", LARGE)] * 2)
    assert not any(failure.final for failure in failures)
    with pytest.raises(KVMemoryExceeded):
        after(which, DEFAULT_POLICY, failures)


def with_whole(decode: str, *, alone: Alone | None = None) -> Ranking:
    return replace(route(decode, "p1" if decode else "", alone), whole=choices("w1 w2"))


def test_whole_hosts_come_after_every_decode_host_and_before_a_prefill_host_alone() -> None:
    assert [row(attempt) for attempt in attempts(with_whole("d1"), RetryPolicy())][-3:] == [
        "whole - w1",
        "whole - w2",
        "prefill-alone p1 -",
    ]


@pytest.mark.parametrize(
    ("error", "begun", "left"),
    [
        (DOWN, False, ["whole - w1", "whole - w2", "prefill-alone p1 -"]),
        (DOWN, True, ["prefill-alone p1 -"]),
        (BUSY, False, []),
    ],
)
def test_a_whole_host_is_asked_if_the_decode_host_failed_and_nothing_of_the_answer_has_come(
    error: DisaggError, begun: bool, left: Sequence[str]
) -> None:
    routed = with_whole("d1")
    failed = Failure(Attempt("disaggregated", host("d1"), host("p1")), "decode", error, begun)
    assert [row(attempt) for attempt in remaining(routed, RetryPolicy(), [failed])] == left
    if begun:  # or it had arrived before an earlier look at the fleet
        earlier = replace(failed, begun=False)
        assert [row(attempt) for attempt in remaining(routed, RetryPolicy(), [earlier], begun=True)] == left


def test_no_host_goes_on_after_what_a_whole_host_has_sent() -> None:
    attempt = Attempt("whole", host("w1"), None)
    assert Failure(attempt, "decode", DOWN, begun=True).final
    assert not Failure(attempt, "decode", DOWN, begun=False).final


def test_a_host_that_refuses_this_client_is_not_waited_for() -> None:
    routed = replace(with_whole("", alone="whole"), whole=choices("w1"))
    failed = Failure(Attempt("whole", host("w1"), None), "decode", ServerRefused("bad key"))
    with pytest.raises(ServerRefused):
        after(routed, RetryPolicy(), [failed])
