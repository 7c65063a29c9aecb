"""The live view: requests in their phases, hosts with reasons and hints, rates, and the events that carry them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from disagg.api.gateway import LiveState
from disagg.api.names import RequestPhase
from disagg.api.status import Load, SenderAudits
from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import DisaggError, Overloaded, RequestError, ServerUnavailable
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.dialects.base import GatewayRequest, Head
from disagg.gateway.dialects.problems import problem_of
from disagg.gateway.watch import feed
from disagg.gateway.watch.board import Board, Rate, RecentMedian
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.hosts import live_hosts
from disagg.gateway.watch.request import Observers
from disagg.inference.attempt import Reason
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.view import FleetView
from disagg.inference.types import Stage
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, completion
from tests.gateway.test_serve import new_http, running

HOST = Host("d", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 8001)
FLEET = Fleet("test", Path("hosts.toml"), {"m": Model("m", {}, 4096)}, {"d": HOST})


def load(status: Any = "ok", **fields: Any) -> Load:
    return Load(status=status, boot_id="b", **fields)


def view(*loads: Load | DisaggError | None) -> FleetView:
    """What a client sees of `d` after these answers to GET /load; None: no answer; an error: of a request."""
    seen = FleetView()
    for one in loads:
        if isinstance(one, Load):
            seen.answered("d", one)
        elif one is None:
            seen.missed("d")
        else:
            ejection = seen.began("d", 1)
            seen.ended("d", 1, seen.of("d").breaker.failed(one, 100.0, 1.0, ejection))
    return seen


@pytest.mark.parametrize(
    ("seen", "state", "reason", "hint"),
    [
        (view(), "unknown", "it was not asked yet", ""),
        (view(load()), "up", "", ""),
        (view(load(), None), "up", "", ""),  # one late answer
        (view(load(), None, None), "down", "it does not answer at https://127.0.0.1:8001", "disagg start --host d"),
        (view(load(), None, load()), "up", "", ""),
        (view(load("loading")), "loading", "it loads its model", ""),
        (view(load("stalled")), "stalled", "its engine makes no progress", "disagg restart --host d"),
        (view(load("error")), "error", "its engine has stopped", "disagg restart --host d"),
        (view(load("draining")), "draining", "it finishes its requests and stops", "disagg start --host d"),
        (
            view(load(), ServerUnavailable("x")),
            "failing",
            "failed lately: left out for 1.0 s",
            "disagg logs --host d",
        ),
    ],
)
def test_the_state_of_a_host_with_its_reason_and_what_helps(
    seen: FleetView, state: str, reason: str, hint: str
) -> None:
    (host,) = live_hosts(FLEET, seen, 100.0)
    assert (host.state, host.reason, host.hint) == (state, reason, hint)


def test_a_host_that_is_up_shows_its_load_and_one_that_is_down_no_old_figures() -> None:
    senders = {"dgx": SenderAudits(accepted=9, verdict="accepted", deviation=0.01)}
    seen = view(load(queue=2, running=3, kv_bytes=10, kv_limit=100, decode_tokens_s=30.0, senders=senders))
    (up,) = live_hosts(FLEET, seen, 0.0)
    assert (up.queue, up.running, up.kv_bytes, up.kv_limit, up.decode_tokens_s) == (2, 3, 10, 100, 30.0)
    assert up.senders == senders
    (down,) = live_hosts(FLEET, view(load(queue=2), None, None), 0.0)
    assert down.queue == 0


@pytest.mark.parametrize(
    ("added", "now", "per_s"),
    [
        ([], 10.0, 0.0),
        ([(10.1, 5)], 10.9, 0.0),  # the second that runs is not over
        ([(10.1, 5)], 11.0, 5.0),
        ([(10.1, 5), (10.9, 5), (11.5, 20)], 12.0, 15.0),
        ([(10.1, 5)], 14.0, 1.25),
        ([(10.1, 5)], 16.1, 0.0),
    ],
)
def test_a_rate_is_that_of_the_last_whole_seconds(added: list[tuple[float, int]], now: float, per_s: float) -> None:
    rate = Rate()
    for at, count in added:
        rate.add(count, at)
    assert rate.per_s(now) == per_s


def test_the_median_forgets_what_is_old() -> None:
    recent = RecentMedian()
    assert recent.median(0.0) is None
    for at, value in ((0.0, 9.0), (4.0, 1.0), (5.0, 3.0)):
        recent.add(value, at)
    assert recent.median(5.0) == 3.0 and recent.median(6.0) == 2.0 and recent.median(60.0) is None


class Seen:
    """A board, and a request whose events it gets."""

    def __init__(self, n: int = 1) -> None:
        self.board = Board("test", {"m": 4096, "other": 2048})
        request = GatewayRequest(model="m", prompts=({"prompt": "x"},), n=n)
        self.observed = Observers([self.board]).accept(Head(request, "r1", time.time()), "openai-chat", "m", "editor")

    @property
    def state(self) -> LiveState:
        return self.board.state((), time.monotonic())


@pytest.mark.parametrize(
    ("moves", "phase"),
    [
        ([], "queue"),
        ([(0, "decode")], "queue"),  # the second answer still waits
        ([(0, "decode"), (1, "prefill")], "prefill"),
        ([(0, "decode"), (1, "transfer")], "transfer"),
        ([(0, "decode"), (1, "decode")], "decode"),
    ],
)
def test_a_request_is_in_the_phase_of_the_answer_that_is_furthest_behind(
    moves: list[tuple[int, RequestPhase]], phase: RequestPhase
) -> None:
    seen = Seen(n=2)
    for choice, one in moves:
        seen.observed.entered(choice, Stage(one, "disaggregated", "p", "d", 100, 60))
    assert [one.phase for one in seen.state.requests] == [phase]


def test_a_running_request_shows_its_hosts_and_tokens_and_is_gone_when_it_ends() -> None:
    seen = Seen()
    seen.observed.entered(0, Stage("decode", "disaggregated", "p", "d", 100, 60))
    seen.observed.generated(0, 3)
    (one,) = seen.state.requests
    assert (one.prefill_server, one.decode_server, one.prompt_tokens, one.held_tokens, one.tokens) == (
        "p",
        "d",
        100,
        60,
        3,
    )
    assert (one.key, one.model, seen.state.totals.running, seen.state.totals.waiting) == ("editor", "m", 1, 0)
    seen.observed.completed(0, completion("one two"))
    seen.observed.ended()
    state = seen.state
    assert state.requests == () and not seen.board.busy
    assert (state.totals.ok, state.last[0].completion_tokens, state.models[0].last) == (1, 2, state.last[0])


def test_failed_and_cancelled_requests_are_counted_and_shown_last() -> None:
    seen = Seen()
    seen.observed.ended(problem_of(ServerUnavailable("gone")))
    assert (seen.state.totals.failed, seen.state.last[0].error) == (1, "gone")
    seen = Seen()
    seen.observed.ended()
    assert (seen.state.totals.cancelled, seen.state.last[0].state) == (1, "cancelled")


def test_a_request_that_is_wrong_itself_is_no_failure_and_names_no_hosts() -> None:
    seen = Seen()
    seen.observed.entered(0, Stage("queue", "disaggregated", "p", "d"))
    seen.observed.ended(problem_of(RequestError("the prompt is empty")))
    (last,) = seen.state.last
    assert (seen.state.totals.failed, last.state, last.error) == (0, "failed", "the prompt is empty")
    assert (last.prefill_server, last.decode_server) == (None, None)
    seen = Seen()
    seen.observed.ended(problem_of(Overloaded("busy until the deadline")))
    assert seen.state.totals.failed == 1


def test_answers_of_hosts_that_stand_in_for_decode_hosts_count_as_fallbacks() -> None:
    seen = Seen(n=2)
    reasons: tuple[Reason, ...] = ("no decode host is left", "first choice")
    for choice, reason in enumerate(reasons):
        seen.observed.entered(choice, Stage("decode", "prefill-alone", "p", None, reason=reason))
        seen.observed.completed(choice, completion("one"))
    assert (seen.state.totals.ok, seen.state.totals.fallbacks) == (2, 1)


def test_the_live_view_has_no_texts_although_the_history_keeps_them() -> None:
    board = Board("test", {"m": 4096})
    request = GatewayRequest(model="m", prompts=({"prompt": "secret"},))
    observed = Observers([board], keep_text=True).accept(Head(request, "r1", 0.0), "openai-chat", "m", "editor")
    observed.completed(0, completion("secret too"))
    state = board.state((), time.monotonic())
    assert state.last[0].completion_tokens == 2 and b"secret" not in state.to_bytes()


def test_a_view_of_one_model_has_nothing_of_the_others() -> None:
    seen = Seen()
    hosts = live_hosts(FLEET, view(load()), 0.0)
    seen.board.sample(hosts, time.monotonic())
    other = seen.board.state(hosts, time.monotonic(), {"other"})
    assert [model.name for model in other.models] == ["other"]
    assert (other.requests, other.hosts, other.totals.waiting) == ((), (), 0)
    assert seen.board.past({"other"})[0].waiting == 0 and seen.board.past()[0].waiting == 1


def test_many_requests_are_all_counted_but_not_all_listed() -> None:
    board = Board("test", {"m": 4096})
    observers = Observers([board])
    for number in range(300):
        request = GatewayRequest(model="m", prompts=({"prompt": "x"},))
        observers.accept(Head(request, f"r{number}", 0.0), "openai-chat", "m", None)
    state = board.state((), time.monotonic())
    assert (state.totals.waiting, len(state.requests)) == (300, 100)


async def read_events(answer: httpx.Response, count: int) -> list[tuple[str, Any]]:
    """The first events of a stream: name and data."""
    found: list[tuple[str, Any]] = []
    name = ""
    async with asyncio.timeout(60):
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if len(found) == count:
                    break
    return found


async def test_a_watcher_gets_the_past_once_and_then_the_state_with_the_apis_that_are_served() -> None:
    async with (
        running(FakeClient("one ")) as gateway,
        new_http() as http,
        http.stream("GET", f"{gateway.url}/api/live") as answer,
    ):
        found = await read_events(answer, 3)
    assert [name for name, _ in found] == ["past", "state", "state"]
    state = LiveState.from_json(found[1][1])
    assert [model.name for model in state.models] == ["m", "other"] and "/v1/chat/completions" in state.apis


async def test_only_so_many_may_watch() -> None:
    async with running(FakeClient(), feed=feed.FeedBounds(watchers=1)) as gateway, new_http() as http:
        async with http.stream("GET", f"{gateway.url}/api/live") as answer:
            await read_events(answer, 1)
            assert (await http.get(f"{gateway.url}/api/live")).status_code == 429
        async with asyncio.timeout(60):  # its place is free again soon after it has left
            while True:
                async with http.stream("GET", f"{gateway.url}/api/live") as answer:
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.02)


async def test_live_view_and_history_need_a_key_and_show_its_models_only(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.add("editor", models=("other",))
    async with fake_client.http(fake_client.app(FakeClient(), file.path)) as http:
        for path in ("/api/live", "/api/history"):
            assert (await http.get(path)).status_code == 401
        headers = {"Authorization": f"Bearer {secret}"}
        assert (await http.get("/api/history?model=m", headers=headers)).status_code == 403
        assert (await http.get("/api/history?limit=0", headers=headers)).json()["error"]["param"] == "limit"
        assert (await http.get("/api/history?state=bad", headers=headers)).status_code == 400
        assert (await http.get("/api/history", headers=headers)).json()["entries"] == []


async def test_a_key_sees_its_own_requests_and_one_that_monitors_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, client = KeyFile(tmp_path / "keys.json"), FakeClient("one ", 60.0)
    monkeypatch.setattr(feed.Feed, "_stopped_within", lambda *_: asyncio.sleep(0, True))  # a stream has one state
    secrets = {name: file.add(name) for name in ("editor", "chat")} | {"watch": file.add("watch", monitor=True)}
    headers = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with fake_client.http(fake_client.app(client, file.path)) as http, asyncio.timeout(60):
        asked = [
            asyncio.ensure_future(http.post("/v1/chat/completions", json=body, headers=headers[name]))
            for name in ("editor", "editor", "chat")
        ]
        while len(client.streams) < 3:
            await asyncio.sleep(0)
        found = {}
        for name, sent in headers.items():
            events = (await http.get("/api/live", headers=sent)).text.split("\n\n")
            state = next(one for one in events if one.startswith("event: state"))
            found[name] = json.loads(state.partition("data: ")[2])
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
    assert [[one["key"] for one in state["requests"]] for state in found.values()] == [
        ["editor", "editor"],
        ["chat"],
        ["editor", "editor", "chat"],
    ]
    assert [state["totals"]["running"] for state in found.values()] == [2, 1, 3]


def test_the_last_answers_and_the_totals_of_a_key_are_its_own() -> None:
    board = Board("test", {"m": 4096})
    request = GatewayRequest(model="m", prompts=({"prompt": "x"},))
    for key in ("1", "2", "2"):
        observed = Observers([board]).accept(Head(request, f"of {key}", 0.0), "openai-chat", "m", key, key)
        observed.generated(0, 2)
        observed.completed(0, completion("one two"))
        observed.ended()
    board.sample((), time.monotonic())
    own, every = (seen.state((), time.monotonic()) for seen in (board.own("1"), board))
    assert [one.request_id for one in own.last] == ["of 1"] and len(every.last) == 3
    assert (own.totals.ok, own.totals.completion_tokens, own.sample, board.own("1").past()) == (1, 2, None, ())
    assert own.models[0].last == own.last[0] and (own.started, every.totals.ok) == (every.started, 3)
    assert board.own("3").state((), time.monotonic()).last == ()


async def watched(live: feed.Feed, key: str | None, allowed: Any = lambda: True) -> list[Any]:
    """The messages of a stream whose caller stays, until it ends."""
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(30):
        await live.watch(None, key, allowed)({"type": "http"}, receive, send)
    return sent


async def test_a_key_that_is_revoked_ends_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {file.add('editor', monitor=True)}"}
    client = FakeClient()

    class Revoking(Board):
        def state(self, *given: Any, **named: Any) -> LiveState:
            if file.read()[0].revoked is None:
                file.revoke("editor")
            return super().state(*given, **named)

    monkeypatch.setattr("disagg.gateway.watch.gateway.Board", Revoking)
    watch = GatewayWatch(cast(AsyncClient, client), feed=feed.FeedBounds(idle_s=0.001))
    async with fake_client.http(fake_client.app(client, file.path, watch), **headers) as http, asyncio.timeout(30):
        answer = await http.get("/api/live")  # returns when the stream has ended
    assert answer.text.count("event: state") == 1


async def test_a_key_has_only_so_many_watchers_and_the_others_still_have_places() -> None:
    live = feed.Feed(Board("test", {"m": 4096}), tuple, feed.FeedBounds(watchers_of_key=1))
    one = asyncio.ensure_future(watched(live, "editor"))
    while not live.watchers:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="with this key"):
        live.watch(None, "editor")
    other = asyncio.ensure_future(watched(live, "chat"))
    while live.watchers < 2:
        await asyncio.sleep(0)
    live.stop()
    assert all(messages[-1]["more_body"] is False for messages in await asyncio.gather(one, other))
    assert live.watchers == 0
    live.watch(None, "editor")
