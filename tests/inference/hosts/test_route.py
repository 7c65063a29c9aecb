"""The ranking of hosts, read as tables: (view, request) -> hosts, best first. No server runs here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from disagg.api.requests import PromptSpeed
from disagg.api.status import Load
from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import ServerUnavailable
from disagg.inference.hosts import route
from disagg.inference.hosts.route import COMPARED, Candidates, Ranking, RouteRequest, rank
from disagg.inference.hosts.view import FleetView


def host(name: str) -> Host:
    return Host(name, "10.0.0.1", ("decode",), "m", EngineOptions("simulated"), 1, kv_port=9)


def candidates(decode: str, prefill: str = "p1") -> Candidates:
    return Candidates("m", tuple(map(host, decode.split())), tuple(map(host, prefill.split())))


def load(**figures: Any) -> Load:
    status = figures.pop("status", "ok")
    return Load(status, boot_id="b", **{"running_limit": 4, **figures})


def seen(**loads: Load) -> FleetView:
    view = FleetView()
    for name, figures in loads.items():
        view.answered(name, figures)
    return view


def ranked(
    view: FleetView, hosts: Candidates, tokens: int = 1000, held: Mapping[str, int] | None = None, start: int = 0
) -> Ranking:
    return rank(view, RouteRequest(hosts, tokens, 100, held or {}), now=0.0, start=start)


def names(ranking: Ranking) -> str:
    return " ".join(choice.host.name for choice in (*ranking.decode, *ranking.prefill))


@pytest.mark.parametrize(
    ("loads", "held", "expected"),
    [
        ({}, {}, "d1 d2 p1 p2"),
        ({"d1": load(running=2)}, {}, "d2 d1 p1 p2"),
        ({"d1": load(running=4, queue=2), "d2": load(running=4)}, {}, "d2 d1 p1 p2"),
        ({"d1": load(decode_tokens_s=20.0), "d2": load(decode_tokens_s=80.0, running=1)}, {}, "d2 d1 p1 p2"),
        ({"d1": load(decode_tokens_s=20.0)}, {}, "d1 d2 p1 p2"),
        ({"d1": load(kv_limit=100, kv_bytes=99), "d2": load(kv_limit=100, kv_bytes=50)}, {}, "d2 d1 p1 p2"),
        ({}, {"d2": 900}, "d2 d1 p1 p2"),
        ({"d2": load(running=4, queue=9)}, {"d2": 900}, "d1 d2 p1 p2"),
        ({"d1": load(decode_tokens_s=40.0), "d2": load(decode_tokens_s=30.0)}, {"d2": 600}, "d2 d1 p1 p2"),
        ({"d1": load(decode_tokens_s=80.0), "d2": load(decode_tokens_s=30.0)}, {"d2": 600}, "d1 d2 p1 p2"),
        ({"d1": load(decode_tokens_s=40.0), "d2": load(decode_tokens_s=30.0)}, {"d2": 64}, "d1 d2 p1 p2"),
        ({"p1": load(queue_tokens=5000)}, {}, "d1 d2 p2 p1"),
        (
            {"p1": load(queue_tokens=5000, prefill_tokens_s=9000.0), "p2": load(prefill_tokens_s=500.0)},
            {},
            "d1 d2 p1 p2",
        ),
        ({"p1": load(prefill_tokens_s=1000.0), "p2": load(prefill_tokens_s=2000.0)}, {}, "d1 d2 p2 p1"),
        ({"p2": load(prefill_tokens_s=20.0)}, {}, "d1 d2 p1 p2"),
    ],
)
def test_the_host_on_which_the_request_ends_first_is_best(
    loads: Mapping[str, Load], held: Mapping[str, int], expected: str
) -> None:
    assert names(ranked(seen(**loads), candidates("d1 d2", "p1 p2"), held=held)) == expected


def test_a_slow_link_makes_its_prefill_host_worse() -> None:
    view = seen(p1=load(prefill_tokens_s=1000.0, links={"10.0.0.1:9": 1e6}), p2=load(prefill_tokens_s=1000.0))
    view.kv_bytes_per_token["m"] = 100_000.0
    ranking = ranked(view, candidates("d1", "p1 p2"))
    assert names(ranking) == "d1 p2 p1"
    assert ranking.prefill[1].costs["transfer"] == pytest.approx(1000 * 100_000 / 1e6 - 1.0)


@pytest.mark.parametrize("status", ["loading", "draining", "stalled", "error"])
def test_a_host_that_cannot_serve_is_left_out_with_the_reason(status: str) -> None:
    ranking = ranked(seen(d1=load(status=status)), candidates("d1 d2"))
    assert names(ranking) == "d2 p1" and ranking.left_out == {"d1": status}
    waited_for = f"d1 is {status}" if status in ("loading", "draining") else ""
    assert ranking.waits_for(ranking.candidates.decode) == waited_for


def test_equal_hosts_are_begun_with_at_random() -> None:
    hosts = candidates("d1 d2 d3", "p1 p2")
    first = Counter(ranked(FleetView(), hosts, start=start).decode[0].host.name for start in range(300))
    assert first == {"d1": 100, "d2": 100, "d3": 100}


def test_without_figures_the_host_with_the_fewest_own_requests_is_next() -> None:
    view, hosts = FleetView(), candidates("d1 d2 d3")
    for start in range(30):
        best = ranked(view, hosts, start=start).decode[0].host.name
        view.began(best, 1000)
    assert [view.of(f"d{number}").outstanding for number in (1, 2, 3)] == [10, 10, 10]


def test_of_many_hosts_a_few_are_compared_and_the_load_stays_even() -> None:
    hosts = candidates(" ".join(f"d{number}" for number in range(200)), "")
    view = FleetView()
    for number in range(2000):
        ranking = ranked(view, hosts, start=number * 7919)
        assert len(ranking.decode) == COMPARED
        view.began(ranking.decode[0].host.name, 10)
    assert max(view.of(f"d{number}").outstanding for number in range(200)) <= 13


def test_of_many_hosts_the_one_that_holds_the_prompt_is_compared() -> None:
    hosts = candidates(" ".join(f"d{number}" for number in range(200)), "")
    assert ranked(FleetView(), hosts, held={"d150": 900}).decode[0].host.name == "d150"


def test_the_reason_of_a_choice_names_what_it_costs() -> None:
    view = seen(d1=load(running=4, queue=3, decode_tokens_s=50.0), p1=load(queue_tokens=500, prefill_tokens_s=500.0))
    ranking = ranked(view, candidates("d1"), held={"d1": 800})
    costs = "queue 2.000 s, prompt 0.400 s, answer 3.000 s"
    assert ranking.decode[0].reason == f"holds 800 tokens of the prompt, {costs}"
    assert ranking.prefill[0].reason == "queue 1.000 s, compute 2.000 s"


def test_the_offer_to_the_decode_host_is_the_best_prefill_hosts_measured_speed() -> None:
    view = seen(p1=load(queue_tokens=500, prefill_tokens_s=500.0, links={"10.0.0.1:9": 1e9}))
    offer = ranked(view, candidates("d1")).offer
    assert offer is not None and (offer.wait_s, offer.tokens_s, offer.link_bytes_s) == (1.0, 500.0, 1e9)
    assert ranked(FleetView(), candidates("d1")).offer is None


@pytest.mark.parametrize(
    ("known", "hosts", "expected"),
    [
        ([], candidates("d1 d2"), "p1 d1 d2"),
        (["p1", "d2"], candidates("d1 d2"), "d1"),
        (["p1", "d1", "d2"], candidates("d1 d2"), ""),
        ([], candidates("d1", ""), ""),
        ([], Candidates("m", (), candidates("").prefill, "prefill"), ""),
    ],
    ids=["a new client", "some", "none", "no prefill host", "a host alone"],
)
def test_whose_loads_are_to_be_read_before_a_prompt_may_be_divided(
    known: Sequence[str], hosts: Candidates, expected: str
) -> None:
    view = seen(**{name: load() for name in known})
    unread = route.unknown(view, RouteRequest(hosts, 1000, 100), now=0.0, start=0)
    assert " ".join(host.name for host in unread) == expected


@pytest.mark.parametrize(
    ("split", "splits", "prefill", "left_out"),
    [
        ("auto", True, "p1 p2", {}),
        ("auto", False, "p2", {"p1": "has the model's first 12 layers"}),
        ("off", True, "p2", {"p1": "has the model's first 12 layers"}),
        (12, True, "p1 p2", {}),
        (0, True, "p1 p2", {}),
        (13, True, "p2", {"p1": "has the model's first 12 layers, and 13 are asked for"}),
    ],
)
def test_a_prefill_host_without_the_layers_that_a_prompt_needs_of_it_is_left_out(
    split: Any, splits: bool, prefill: str, left_out: dict[str, str]
) -> None:
    view = seen(p1=load(layers=12, splits=splits), p2=load(splits=splits), d1=load())
    ranking = route.rank(view, RouteRequest(candidates("d1", "p1 p2"), 1000, 100, split=split), 0.0, 0)
    assert " ".join(sorted(choice.host.name for choice in ranking.prefill)) == prefill
    assert ranking.left_out == left_out


def test_if_no_prefill_host_has_these_layers_the_decode_host_is_asked_and_says_so() -> None:
    view = seen(p1=load(layers=12, splits=True), p2=load(layers=12, splits=True))
    ranking = route.rank(view, RouteRequest(candidates("d1", "p1 p2"), 1000, 100, split=13), 0.0, 0)
    assert len(ranking.prefill) == 2 and not ranking.left_out


def test_a_host_that_is_down_is_not_asked_for_its_load_again() -> None:
    view = FleetView()
    while view.of("p1").reachable != "down":
        view.missed("p1")
    unread = route.unknown(view, RouteRequest(candidates("d1"), 1000, 100), now=0.0, start=0)
    assert [host.name for host in unread] == ["d1"]


def test_a_decode_host_of_this_version_learns_what_the_prefill_host_can_and_an_earlier_one_only_its_speed() -> None:
    known = {"splits": True, "layers": 12, "kv_version": 5}
    speeds = (PromptSpeed(8191, 500.0), PromptSpeed(65535, 400.0))
    view = seen(p1=load(**known, prefill_speeds=speeds), d1=load(kv_version=5), d2=load())
    (choice,) = ranked(view, candidates("d1")).prefill
    offer = route.offer_of(view, choice, host("d1"), alone=False)
    assert offer is not None and offer.speeds == speeds
    assert structs.replace(offer, speeds=()).to_json() == {"wait_s": 0.0, **known, "alone": False}
    assert route.offer_of(view, choice, host("d2")) is None, "its speed is not measured"
    view.answered("p1", load(**known, prefill_tokens_s=500.0))
    offer = route.offer_of(view, choice, host("d2"))
    assert offer is not None and offer.to_json() == {"wait_s": 0.0, "tokens_s": 500.0}
    assert route.offer_of(view, choice, host("d2"), alone=False) is None


@pytest.mark.parametrize(
    ("first", "other", "follows"),
    [
        ({}, {}, True),
        ({"kv_version": 4}, {"kv_version": 5, "splits": True}, True),
        ({"kv_version": 5, "splits": True}, {"kv_version": 5, "splits": True}, True),
        ({"kv_version": 5, "splits": True}, {"kv_version": 4}, False),
        ({"kv_version": 5, "splits": True}, {"kv_version": 5}, False),
        ({"kv_version": 5}, {"kv_version": 5, "splits": True}, True),
        ({"kv_version": 5, "splits": True}, {"kv_version": 5, "splits": True, "layers": 12}, False),
        ({"kv_version": 5, "splits": True, "layers": 12}, {"kv_version": 5, "splits": True, "layers": 12}, True),
        ({"kv_version": 5, "splits": True, "layers": 12}, {"kv_version": 5, "splits": True, "layers": 11}, False),
        ({"kv_version": 5, "splits": True}, None, False),
    ],
)
def test_a_decode_host_waits_for_no_other_prefill_host_that_cannot_go_on(
    first: dict[str, Any], other: dict[str, Any] | None, follows: bool
) -> None:
    view = seen(p1=load(**first), **({"p2": load(**other)} if other is not None else {}))
    ranking = ranked(view, candidates("d1", "p1 p2"))
    assert (ranking.elsewhere_s(host("p1"), view) is not None) == follows


def test_a_model_without_the_role_that_must_answer_is_an_error() -> None:
    fleet = Fleet("f", Path("hosts.toml"), {"m": Model("m", {}, 10)}, {"p": host("p")})
    assert route.candidates(fleet, "m").decode == (fleet.hosts["p"],)
    with pytest.raises(ServerUnavailable, match="no prefill host serves m"):
        route.candidates(fleet, "m", "prefill")


def test_a_model_whose_prefill_hosts_have_its_first_layers_only_is_answered_by_none_of_them_alone() -> None:
    part = Host("p", "10.0.0.1", ("prefill",), "m", EngineOptions("transformers", layers="0:2"), 1)
    fleet = Fleet("f", Path("hosts.toml"), {"m": Model("m", {}, 10)}, {"p": part, "d": host("d")})
    assert route.candidates(fleet, "m").prefill == (part,)
    with pytest.raises(ServerUnavailable, match="every prefill host of m has the first layers of the model only"):
        route.candidates(fleet, "m", "prefill")


def test_a_host_that_has_answered_once_is_seen_although_it_is_down_now() -> None:
    view, hosts = FleetView(), candidates("d1 d2")
    assert ranked(view, hosts).unseen == {"d1", "d2", "p1"}
    view.missed("d1")
    assert ranked(view, hosts).unseen == {"d1", "d2", "p1"}
    view.answered("d2", load())
    view.missed("d2")
    view.missed("d2")
    assert ranked(view, hosts).unseen == frozenset()
