"""How a caller finds out that a host does not get on, how it waits, how it keeps its leases. No server runs here."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from disagg.api.events import ProgressEvent
from disagg.config import EngineOptions, Host
from disagg.errors import DisaggError, Overloaded, ServerSilent, ServerUnavailable
from disagg.inference.attempts.retry import Pause
from disagg.inference.attempts.waiting import LONGEST_DELAY_S, RetryBudget, Waiting
from disagg.inference.hosts.background import Heartbeat, Refresher
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import ProgressJudge, Timeouts
from disagg.token import Tokens
from tests.inference.scripted import answering

D = Host("d", "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 1)
E = Host("e", "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 2)


@pytest.mark.parametrize(
    ("phases", "beats", "stalled"),
    [
        (["generating"] * 4, [5, 5, 5, 5], True),
        (["generating"] * 4, [5, 6, 6, 6], False),
        (["generating"] * 5, [5, 6, 6, 6, 6], True),
        (["generating"] * 9, [*range(9)], False),
        (["computing the prompt"] * 4, [5, 5, 5, 5], True),
        (["waiting for KV"] * 9, [5] * 9, False),
        (["queued"] * 9, [5] * 9, False),
        (["queued", "queued", "generating", "generating"], [5, 5, 5, 5], False),
    ],
)
def test_a_host_that_computes_and_finishes_nothing_for_3_s_is_stuck(
    phases: list[str], beats: list[int], stalled: bool
) -> None:
    """One progress event a second."""
    assert isinstance(judged(phases, beats, Timeouts(stall=3.0)), ServerSilent) is stalled


@pytest.mark.parametrize(
    ("phases", "given_up"),
    [
        (["queued"] * 4, True),
        (["arriving", "tokenising", "queued", "queued"], True),
        (["queued"] * 3, False),
        (["queued", "computing the prompt", "queued", "queued", "queued"], False),
        (["waiting for KV"] * 9, False),
    ],
)
def test_a_host_that_has_not_begun_after_3_s_counts_as_busy(phases: list[str], given_up: bool) -> None:
    assert isinstance(judged(phases, [0] * len(phases), Timeouts(queue=3.0)), Overloaded) is given_up


def judged(phases: list[str], beats: list[int], timeouts: Timeouts) -> DisaggError | None:
    """The first problem, if such an event arrives every second."""
    progress = ProgressJudge(D, timeouts, queued_since=0.0)
    events = [ProgressEvent(phase=phase, beats=count) for phase, count in zip(phases, beats, strict=True)]
    problems = [progress.problem(event, float(now)) for now, event in enumerate(events)]
    return next((problem for problem in problems if problem), None)


async def events_of(*chunks: bytes, timeouts: Timeouts = Timeouts()) -> list[str]:  # noqa: B008 - frozen
    async with answering(*chunks) as (http, host, _):
        call = host_calls.EventCall(host, "/generate", ProgressEvent(phase="", beats=0), "r", timeouts)
        async with host_calls.events(http, call) as events:
            names = list[str]()
            await events.to_end(lambda event: names.append(event.event))
            return names


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "sent",
    [
        b"event: tokens\ndata: " + NESTED + b"\n\n",
        b"event: done\ndata: {}\n\n",
        b"event: done\ndata: 7\n\n",
        b"event: tokens\ndata: {\n\n",
        b"event: tokens\ndata: \xff\n\n",
        b"event: error\ndata: " + NESTED + b"\n\n",
        b"event: error\ndata: {}\n\n",
        b"event: error\ndata: []\n\n",
        b'event: error\ndata: {"code": 5, "message": null}\n\n',
        b"data: x\n\n",
        b"event: \xff\n\n",
        b"",
    ],
)
async def test_whatever_a_host_sends_is_an_answer_or_a_disagg_error(sent: bytes) -> None:
    with pytest.raises(DisaggError):
        await events_of(sent)


@pytest.mark.parametrize("sent", [NESTED, b"{}", b"[]", b"\xff", b"", b'{"status": "odd", "boot_id": 5}'])
@pytest.mark.parametrize("status", [200, 503])
async def test_whatever_a_host_answers_to_get_load_it_is_up_or_down(sent: bytes, status: int) -> None:
    view = FleetView()
    async with answering(sent, status=status) as (http, host, _):
        for _ in range(2):
            await Refresher(http, view).read([host])
    assert view.of("d").obstacle(time.monotonic()) == "down"


async def test_a_stuck_host_ends_the_call() -> None:
    progress = b'event: progress\ndata: {"phase": "generating", "beats": 3}\n\n'
    with pytest.raises(ServerSilent, match="generating, and its engine has made no progress"):
        await events_of(progress, progress, timeouts=Timeouts(stall=0.0))


def pause(*, limited: bool, reason: str = "no host is up") -> Pause:
    return Pause(0.1, reason, limited, ServerUnavailable("no host is up"))


async def test_a_wait_for_a_host_that_is_not_up_is_bounded() -> None:
    waiting = Waiting(Timeouts(none_up=0.1, note=9), lambda _: None)
    assert await waiting.wait(pause(limited=True), 0.1)
    assert not await waiting.wait(pause(limited=True), 0.1)


async def test_a_wait_for_a_busy_host_is_bounded_by_the_deadline_only_and_stated_once() -> None:
    notes: list[str] = []
    waiting = Waiting(Timeouts(none_up=0.0, note=0.05), notes.append)
    for _ in range(3):
        await waiting.wait(pause(limited=False, reason="p1 is busy"), 0.03)
    assert set(notes) == {"waiting: p1 is busy"} and waiting.error is None


async def test_a_deadline_during_a_wait_has_the_reason_of_the_wait() -> None:
    waiting = Waiting(Timeouts(), lambda _: None)
    busy = Pause(9, "p1 is busy", False, Overloaded("p1 is busy"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await waiting.wait(busy, 9)
    assert waiting.error is busy.error


def test_the_retries_of_one_client_are_spread() -> None:
    budget = RetryBudget(per_s=10)
    assert [round(budget.delay(100.0), 3) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    assert budget.delay(200.0) == 0.0


def test_no_retry_is_delayed_for_long_however_many_requests_of_a_client_wait() -> None:
    budget = RetryBudget(per_s=10)
    assert max(budget.delay(100.0) for _ in range(500)) == LONGEST_DELAY_S


async def test_leases_of_requests_that_run_for_long_are_extended_on_their_hosts() -> None:
    async with (
        answering(b'{"unknown": []}') as (http, d, asked_d),
        answering(b'{"unknown": []}') as (_, other, asked_e),
    ):
        e = dataclasses.replace(other, name="e")
        heartbeat = Heartbeat(http, lease_s=0.2)
        with heartbeat.lease(d, "long"), heartbeat.lease(e, "long"):
            with heartbeat.lease(d, "short"):
                pass
            async with asyncio.timeout(60):
                while len(asked_d) < 2 or len(asked_e) < 2:
                    await asyncio.sleep(0.01)
        await heartbeat.stop()
    assert {sent.partition(b"\r\n\r\n")[2] for sent in (*asked_d, *asked_e)} == {b'{"request_ids":["long"]}'}


async def test_a_lease_is_extended_no_more_once_its_host_has_ended_the_request() -> None:
    async with Connections(Tokens("token")) as http:
        heartbeat, extended = Heartbeat(http, lease_s=400.0), list[list[str]]()
        with heartbeat.lease(D, "a"), heartbeat.lease(D, "b"):
            for unknown in (["a", "b"], ["b"], ["a", "b"], []):  # neither has come; a has; a has ended
                extended.append(heartbeat.due(time.monotonic() + 100)["d"])
                heartbeat._note(D, extended[-1], unknown)
        await heartbeat.stop()
    assert extended == [["a", "b"], ["a", "b"], ["a", "b"], ["b"]]


async def test_a_request_that_has_just_begun_needs_no_heartbeat() -> None:
    async with Connections(Tokens("token")) as http:
        heartbeat = Heartbeat(http, lease_s=400.0)
        with heartbeat.lease(D, "r"):
            now = time.monotonic()
            assert heartbeat.due(now) == {} and heartbeat.due(now + 100) == {"d": ["r"]}
        assert heartbeat.due(now + 100) == {}
        await heartbeat.stop()


async def test_the_hosts_of_every_role_that_requests_use_are_asked() -> None:
    async with Connections(Tokens("token")) as http:
        refresher = Refresher(http, FleetView())
        with refresher.using([D]), refresher.using([E]):
            assert {host.name for host in refresher.due(time.monotonic())} == {"d", "e"}
        await refresher.stop()


async def test_a_reason_whose_figures_change_is_stated_once() -> None:
    notes: list[str] = []
    waiting = Waiting(Timeouts(note=0.0), notes.append)
    for tokens in (512, 8123):
        pause = Pause(0.0, "p1 is busy", False, Overloaded(""), f"{tokens} prompt tokens wait to be computed")
        await waiting.wait(pause, 0.0)
    assert notes == ["waiting: p1 is busy: 512 prompt tokens wait to be computed"]


async def test_closing_the_client_ends_a_wait() -> None:
    waiting = Waiting(Timeouts(), lambda _: None)
    waiting.closed.set()
    assert await waiting.wait(pause(limited=False, reason="p1 is busy"), 1e9)
