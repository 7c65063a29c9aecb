"""The retry policy, read as tables: no server runs here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import (
    Cancelled,
    ContextLengthExceeded,
    DisaggError,
    Overloaded,
    PeerLost,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.attempts import Attempt, Failure, RetryPolicy, attempts, remaining
from disagg.inference.route import Route

LOST, BUSY, SILENT, DOWN = PeerLost(""), Overloaded(""), ServerSilent(""), ServerUnavailable("")


def host(name: str) -> Host:
    return Host(name, "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 1)


def route(decode: str, prefill: str) -> Route:
    return Route("m", tuple(map(host, decode.split())), tuple(map(host, prefill.split())))


def row(attempt: Attempt) -> tuple[str, str, str, str]:
    return (
        attempt.method,
        attempt.prefill.name if attempt.prefill else "-",
        attempt.decode.name if attempt.decode else "-",
        attempt.reason,
    )


def test_every_attempt_of_a_route_in_order() -> None:
    assert [row(attempt) for attempt in attempts(route("d1 d2", "p1 p2 p3"), RetryPolicy())] == [
        ("disaggregated", "p1", "d1", "first choice"),
        ("disaggregated", "p2", "d1", "prefill failed"),
        ("fallback", "-", "d1", "prefill failed"),
        ("disaggregated", "p1", "d2", "decode host failed"),
        ("disaggregated", "p2", "d2", "prefill failed"),
        ("fallback", "-", "d2", "prefill failed"),
    ]


@pytest.mark.parametrize(
    ("decode", "prefill", "policy", "expected"),
    [
        ("d1", "p1", RetryPolicy(), ["disaggregated p1 d1", "disaggregated p1 d1", "fallback - d1"]),
        ("d1", "p1", RetryPolicy(prefill_attempts=1), ["disaggregated p1 d1", "fallback - d1"]),
        ("d1 d2", "", RetryPolicy(), ["decode-alone - d1", "decode-alone - d2"]),
        ("", "p1 p2", RetryPolicy(), ["prefill-alone p1 -"]),
    ],
)
def test_small_routes(decode: str, prefill: str, policy: RetryPolicy, expected: Sequence[str]) -> None:
    assert [" ".join(row(attempt)[:3]) for attempt in attempts(route(decode, prefill), policy)] == expected


def performed(which: Route, outcomes: Sequence[tuple[str, DisaggError]]) -> list[str]:
    """The attempts that are performed if they fail in this way, one after the other, and the next one answers."""
    failures: list[Failure] = []
    rows = []
    for attempt in remaining(attempts(which, RetryPolicy()), failures):
        rows.append(" ".join(row(attempt)[:3]))
        if len(failures) == len(outcomes):
            break
        side, error = outcomes[len(failures)]
        failures.append(Failure(attempt, side, error))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize(
    ("prefill", "outcomes", "expected"),
    [
        ("p1 p2", [], ["disaggregated p1 d1"]),
        ("p1 p2", [("prefill", LOST)], ["disaggregated p1 d1", "disaggregated p2 d1"]),
        ("p1", [("prefill", BUSY)], ["disaggregated p1 d1", "disaggregated p1 d1"]),
        ("p1", [("prefill", SILENT)], ["disaggregated p1 d1", "fallback - d1"]),
        ("p1", [("prefill", LOST)] * 2, ["disaggregated p1 d1", "disaggregated p1 d1", "fallback - d1"]),
        ("p1 p2", [("decode", DOWN)], ["disaggregated p1 d1", "disaggregated p1 d2"]),
        ("p1 p2", [("decode", SILENT)], ["disaggregated p1 d1", "disaggregated p1 d2"]),
        (
            "p1 p2",
            [("prefill", SILENT), ("decode", BUSY)],
            ["disaggregated p1 d1", "disaggregated p2 d1", "disaggregated p2 d2"],
        ),
        ("p1", [("prefill", SILENT), ("decode", DOWN)], ["disaggregated p1 d1", "fallback - d1", "fallback - d2"]),
        ("p1", [("decode", DOWN)] * 2, ["disaggregated p1 d1", "disaggregated p1 d2"]),
    ],
)
def test_what_follows_which_failure(
    prefill: str, outcomes: Sequence[tuple[str, DisaggError]], expected: Sequence[str]
) -> None:
    assert performed(route("d1 d2", prefill), outcomes) == expected


@pytest.mark.parametrize(
    ("method", "side", "error", "retryable"),
    [
        ("disaggregated", "prefill", LOST, True),
        ("disaggregated", "prefill", BUSY, True),
        ("disaggregated", "prefill", ContextLengthExceeded(""), False),
        ("disaggregated", "prefill", Cancelled(""), False),
        ("disaggregated", "decode", DOWN, True),
        ("disaggregated", "decode", BUSY, True),
        ("disaggregated", "decode", ContextLengthExceeded(""), False),
        ("fallback", "decode", DOWN, True),
        ("prefill-alone", "prefill", DOWN, False),
    ],
)
def test_which_failures_are_followed_by_another_attempt(
    method: str, side: str, error: DisaggError, retryable: bool
) -> None:
    attempt = Attempt(method, host("d1"), host("p1"))  # type: ignore[arg-type]
    assert Failure(attempt, side, error).retryable is retryable  # type: ignore[arg-type]
