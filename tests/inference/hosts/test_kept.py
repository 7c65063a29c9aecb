"""Which host loads a model, read as tables: what keepers state -> hosts, best first. No server runs here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from disagg.api.keeper import KeptModel, LoadEvent
from disagg.api.requests import MAX_DEADLINE_S
from disagg.api.status import Load
from disagg.config import EngineOptions, Host
from disagg.inference.attempts.retry import final_error
from disagg.inference.hosts.background import Refresher
from disagg.inference.hosts.route import Candidates, Ranking, RouteRequest, rank
from disagg.inference.hosts.view import FleetView
from disagg.inference.http.connections import Connections
from disagg.token import Tokens

GB = 1 << 30


def served(name: str) -> Host:
    keeper, _, model = name.partition("/")
    return Host(name, "10.0.0.1", ("decode",), model, EngineOptions("simulated"), 0, kv_port=0, keeper=keeper)


def kept(state: str = "asleep", model: str = "m", **fields: Any) -> KeptModel:
    stated = {"model": model, "state": state, "port": 8101, "kv_port": 8102, "wait_s": 10.0, "need_bytes": GB, **fields}
    return KeptModel.from_json(stated)


def stated(view: FleetView, keeper: str, *models: KeptModel, free: int = 2 * GB) -> None:
    view.keeper_answered(keeper, Load("ok", boot_id="k", models=models, budget_bytes=4 * GB, used_bytes=4 * GB - free))


def test_a_prefill_host_that_has_no_room_for_its_model_for_days_is_stated_within_the_bounds_of_a_request() -> None:
    view, hosts = FleetView(), [replace(served(name), roles=("prefill",)) for name in ("a/m", "b/m")]
    stated(view, "b", kept(wait_s=86400.0, load_s=86400.0, evicts=True))
    candidates = Candidates("m", (served("d/m"),), tuple(hosts))
    ranking = rank(view, RouteRequest(candidates, 100, 30), now=0.0, start=0)
    assert ranking.prefill[-1].cost_s > MAX_DEADLINE_S == ranking.elsewhere_s(hosts[0], view)


def ranked(view: FleetView, *hosts: str, answer_tokens: int = 30) -> Ranking:
    candidates = Candidates("m", tuple(map(served, hosts)), ())
    return rank(view, RouteRequest(candidates, 100, answer_tokens), now=0.0, start=0)


def names(ranking: Ranking) -> str:
    return " ".join(choice.host.name for choice in ranking.decode)


ASLEEP = kept()
READY = kept("ready")
LOADING = kept("loading", wait_s=8.0)
EVICTING = kept(evicts=True)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (ASLEEP, READY, "b/m a/m"),
        (ASLEEP, LOADING, "b/m a/m"),
        (kept(wait_s=1.0), kept("loading", wait_s=30.0), "a/m b/m"),
        (EVICTING, ASLEEP, "b/m a/m"),
        (EVICTING, kept(wait_s=19.0, load_s=9.0), "b/m a/m"),
        (EVICTING, kept("loading", wait_s=29.0), "b/m a/m"),
        (kept(need_bytes=3 * GB), kept(wait_s=19.0, load_s=9.0), "b/m a/m"),  # more than is free
        (kept("failed", reason="out of memory"), ASLEEP, "b/m"),
        (kept("absent", reason="no weights"), ASLEEP, "b/m"),
        (kept("draining"), READY, "b/m a/m"),
    ],
)
def test_the_host_that_has_the_model_is_first_then_the_one_with_room(a: KeptModel, b: KeptModel, expected: str) -> None:
    view = FleetView()
    stated(view, "a", a)
    stated(view, "b", b)
    assert names(ranked(view, "a/m", "b/m")) == expected


def test_a_queue_is_waited_in_unless_a_load_elsewhere_is_over_sooner() -> None:
    view = FleetView()
    stated(view, "a", READY)
    stated(view, "b", ASLEEP)
    for queue, first in ((8, "a/m"), (200, "b/m")):
        view.answered("a/m", Load("ok", boot_id="x", queue=queue, running=4, running_limit=4, decode_tokens_s=30.0))
        assert ranked(view, "a/m", "b/m").decode[0].host.name == first


@pytest.mark.parametrize(
    ("used_a", "used_b", "first"), [(300.0, 2.0, "a/m"), (2.0, 300.0, "b/m"), (None, 300.0, "a/m")]
)
def test_the_model_goes_that_was_not_used_for_the_longest_time_on_any_host(
    used_a: float | None, used_b: float | None, first: str
) -> None:
    view = FleetView()
    for keeper, used_s in (("a", used_a), ("b", used_b)):
        stated(view, keeper, EVICTING, kept("ready", model="n", load_s=10.0, used_s=used_s))
    assert ranked(view, "a/m", "b/m").decode[0].host.name == first
    view.began(f"{first[0]}/n", 100)
    assert ranked(view, "a/m", "b/m").decode[0].host.name != first


def test_all_clients_load_a_model_on_the_same_one_of_equal_hosts() -> None:
    first = set()
    for start in range(6):
        view = FleetView()
        for keeper in "abc":
            stated(view, keeper, ASLEEP)
        candidates = Candidates("m", tuple(map(served, ("a/m", "b/m", "c/m"))), ())
        first.add(rank(view, RouteRequest(candidates, 100, 30), 0.0, start).decode[0].host.name)
    assert len(first) == 1


def test_requests_of_this_client_follow_its_load_before_the_keeper_states_it() -> None:
    view = FleetView()
    for keeper in "ab":
        stated(view, keeper, ASLEEP)
    (first, other) = (choice.host for choice in ranked(view, "a/m", "b/m").decode)
    view.wakes(other, 1)
    for _ in range(4):
        assert ranked(view, "a/m", "b/m", answer_tokens=300).decode[0].host.name == other.name
        view.wakes(other, 1)
    view.wakes(other, -5)
    assert ranked(view, "a/m", "b/m").decode[0].host.name == first.name


def test_models_that_this_client_loads_take_room_before_the_keeper_states_it() -> None:
    view = FleetView()
    models = [kept(model=name) for name in "mno"]
    stated(view, "a", *models)
    for name in "mn":
        assert "loading what goes" not in view.loading_costs(served(f"a/{name}"))
        view.wakes(served(f"a/{name}"), 1)
    assert "loading what goes" in view.loading_costs(served("a/o"))
    stated(view, "a", kept("loading"), *models[1:], free=GB)  # one of both
    assert "loading what goes" in view.loading_costs(served("a/o"))


def test_a_host_is_asked_at_the_ports_that_its_keeper_states() -> None:
    view = FleetView()
    stated(view, "a", READY)
    host = ranked(view, "a/m").decode[0].host
    assert (host.port, host.kv_port) == (8101, 8102)
    view.load_event(served("a/m"), LoadEvent(model="m", state="loading", left_s=3.0, port=8103, kv_port=8104))
    host = ranked(view, "a/m").decode[0].host
    assert (host.port, host.kv_port, ranked(view, "a/m").decode[0].costs["loading"]) == (8103, 8104, 3.0)


def test_what_a_process_has_stated_is_void_when_its_model_is_unloaded() -> None:
    view = FleetView()
    stated(view, "a", READY)
    view.answered("a/m", Load("ok", boot_id="x", queue=9))
    view.affinity.remember((b"1",), "a/m", 64, 256)
    stated(view, "a", ASLEEP)
    assert view.of("a/m").load is None and not view.affinity.held((b"1",))
    assert ranked(view, "a/m").decode[0].costs["queue"] == 0


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ({}, "not asked yet"),
        ({"missed": 2}, "down"),
        ({"stated": ()}, "not among the models of its host: run `disagg deploy`"),
        ({"stated": (kept("failed", reason="out of memory"),)}, "failed: out of memory"),
        ({"stated": (kept("absent"),)}, "absent"),
    ],
)
def test_a_model_that_a_host_cannot_load_is_left_out_with_the_reason(events: Mapping[str, Any], why: str) -> None:
    view = FleetView()
    for _ in range(events.get("missed", 0)):
        view.missed("a")
    if "stated" in events:
        stated(view, "a", *events["stated"])
    ranking = ranked(view, "a/m")
    assert ranking.left_out == {"a/m": why}
    assert ranking.cannot_serve(ranking.candidates.decode) == why.startswith(("failed", "absent"))
    helps = {
        "absent": "disagg models pull m",
        "failed: out of memory": "remove the cause, then run `disagg models load m`",
    }
    assert final_error(ranking, ()).hint == helps.get(why, "run `disagg status`; `disagg start` starts what is stopped")


def test_a_model_that_is_taken_off_its_host_gets_no_more_requests() -> None:
    view = FleetView()
    stated(view, "a", READY, kept("ready", model="n"))
    stated(view, "a", kept("ready", model="n"))
    assert "not among the models" in ranked(view, "a/m").left_out["a/m"]


async def test_models_without_a_process_are_asked_for_by_their_keeper_at_once() -> None:
    keeper, view = Host("a", "127.0.0.1", ("decode",), "", EngineOptions("simulated"), 1), FleetView()
    stated(view, "a", *(kept(model=f"m{number}") for number in range(100)), kept("ready"))
    async with Connections(Tokens("t")) as http:
        refresher = Refresher(http, view, {"a": keeper})
        with refresher.using([served(f"a/m{number}") for number in range(100)]), refresher.using([served("a/m")]):
            assert {host.name for host in refresher.due(time.monotonic())} == {"a", "a/m"}
        await refresher.stop()


def test_a_model_without_a_process_is_down_when_its_keeper_is() -> None:
    view = FleetView()
    stated(view, "a", ASLEEP)
    view.missed("a")
    view.missed("a", refused=True)
    assert ranked(view, "a/m").left_out == {"a/m": "down"} and view.of("a/m").refused


def test_a_model_whose_keeper_has_answered_once_is_seen_although_nothing_listens_there_now() -> None:
    """So its requests wait, as for a keeper that its service manager starts again."""
    view = FleetView()
    assert ranked(view, "a/m").unseen == {"a/m"}
    stated(view, "a", ASLEEP)
    for _ in range(2):
        view.missed("a/m", refused=True)
    assert view.of("a/m").obstacle(0.0) == "down"
    assert ranked(view, "a/m").unseen == frozenset()
