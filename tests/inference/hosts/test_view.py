"""What a client sees of its fleet: transitions of a host's view, its circuit breaker, and what hosts hold. All pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from disagg.api.requests import ChatMessage, GenerateBody
from disagg.api.status import Load, ServerState
from disagg.errors import (
    Cancelled,
    CapabilityMissing,
    ContextLengthExceeded,
    DeadlineExceeded,
    DisaggError,
    KVRefuted,
    ModelError,
    Overloaded,
    PeerLost,
    ProtocolError,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.hosts.affinity import BLOCK_BYTES, Affinity, chain, content_of, prompt_of
from disagg.inference.hosts.breaker import CLOSED, Breaker
from disagg.inference.hosts.view import UNKNOWN, FleetView, HostView

EJECTED = CLOSED.failed(ServerUnavailable(""), now=0.0, jitter=1.0, ejection=0.0)
Step = Callable[[HostView], HostView]


def load(status: ServerState = "ok", boot_id: str = "a", queue: int = 0, running: int = 0, tokens: int = 0) -> Load:
    return Load(status, boot_id=boot_id, queue=queue, running=running, queue_tokens=tokens)


def answered(status: ServerState = "ok", boot_id: str = "a") -> Step:
    return lambda view: view.answered(load(status, boot_id))


def missed(view: HostView) -> HostView:
    return view.missed()


@pytest.mark.parametrize(
    ("steps", "obstacle"),
    [
        ([], ""),
        ([missed], ""),
        ([missed, missed], "down"),
        ([missed, answered(), missed], ""),
        ([missed, missed, answered()], ""),
        ([answered("loading")], "loading"),
        ([answered("draining")], "draining"),
        ([answered("stalled")], "stalled"),
        ([answered("error")], "error"),
        ([answered("loading"), answered("ok")], ""),
        ([lambda view: view.answered(None)], ""),
    ],
)
def test_two_misses_are_down_and_one_good_answer_is_up(steps: Sequence[Step], obstacle: str) -> None:
    view = UNKNOWN
    for step in steps:
        view = step(view)
    assert view.obstacle(now=0.0) == obstacle


def test_a_restart_drops_what_was_remembered_about_the_host() -> None:
    view = FleetView()
    view.answered("d", load(boot_id="a"))
    ejection = view.began("d", 10)
    view.ended("d", 10, view.of("d").breaker.failed(ServerUnavailable(""), 0.0, 1.0, ejection))
    view.affinity.remember((b"1",), "d", 64, 256)
    assert view.of("d").obstacle(0.5)
    view.answered("d", load(boot_id="a"))
    assert view.of("d").obstacle(0.5) and view.affinity.held((b"1",))
    view.answered("d", load(boot_id="b"))
    assert not view.of("d").obstacle(0.5) and not view.affinity.held((b"1",))


def test_own_requests_are_counted_at_once_and_not_twice() -> None:
    view = UNKNOWN.answered(load(queue=1, running=2, tokens=100)).began(50)
    assert (view.ahead, view.tokens_ahead) == (4, 150)
    view = view.answered(load(queue=1, running=3, tokens=150))  # the host counts it now
    assert (view.ahead, view.tokens_ahead) == (4, 150)
    view = view.ended(50, CLOSED)
    assert (view.ahead, view.tokens_ahead) == (3, 100)


def test_a_host_without_figures_counts_own_requests() -> None:
    assert (UNKNOWN.began(50).began(7).ahead, UNKNOWN.began(50).began(7).tokens_ahead) == (2, 57)


@pytest.mark.parametrize(
    ("error", "failures", "ejected"),
    [
        (ServerUnavailable(""), 1, True),
        (ServerSilent(""), 1, True),
        (ModelError(""), 1, False),
        (ModelError(""), 3, True),
        (DisaggError(""), 3, True),
        (ProtocolError(""), 3, True),
        (KVRefuted(""), 3, True),
        (PeerLost(""), 9, False),
        (Overloaded(""), 9, False),
        (ContextLengthExceeded(""), 9, False),
        (DeadlineExceeded(""), 9, False),
        (Cancelled(""), 9, False),
        (CapabilityMissing(""), 9, False),
    ],
)
def test_which_failures_eject_a_host(error: DisaggError, failures: int, ejected: bool) -> None:
    breaker = CLOSED
    for _ in range(failures):
        breaker = breaker.began().failed(error, now=100.0, jitter=1.0, ejection=breaker.until)
    assert (breaker.closed_for(100.0) > 0) is ejected


def test_each_ejection_in_a_row_is_twice_as_long_up_to_a_bound() -> None:
    breaker, now, lengths = CLOSED, 0.0, []
    for _ in range(7):
        breaker = breaker.began().failed(ServerUnavailable(""), now, jitter=1.0, ejection=breaker.until)
        lengths.append(breaker.closed_for(now))
        now = breaker.until
    assert lengths == [1, 2, 4, 8, 16, 30, 30]
    assert CLOSED.failed(ServerUnavailable(""), 0.0, jitter=0.0, ejection=0.0).until == 0.5


def test_after_an_ejection_one_request_finds_out() -> None:
    ejected = EJECTED
    view = HostView(breaker=ejected)
    assert view.obstacle(0.9).startswith("failed lately") and not view.obstacle(1.0)
    probing = view.began(1)
    assert probing.obstacle(1.0), "a second request while the first finds out"
    assert not probing.ended(1, probing.breaker.succeeded()).obstacle(1.0)
    assert not probing.ended(1, probing.breaker.ended(1.0)).obstacle(1.0), "cancelled: another may find out"
    assert probing.ended(1, probing.breaker.failed(ServerUnavailable(""), 1.0, 1.0, 1.0)).breaker.until == 3.0


@pytest.mark.parametrize(
    ("what", "ejection", "now", "expected"),
    [
        # (probing, ejections, until) of a host that a request probes after its first ejection
        ("a request ends that began before the ejection", 0.0, 1.5, (True, 1, 1.0)),
        ("a request fails that began before the ejection", 0.0, 1.5, (True, 1, 1.0)),
        ("a request fails that another host is to blame for", 0.0, 1.5, (True, 1, 1.0)),
        ("the probe ends", 1.0, 1.5, (False, 1, 1.0)),
        ("the probe fails", 1.0, 1.5, (False, 2, 3.5)),
        ("the probe fails that another host is to blame for", 1.0, 1.5, (False, 1, 1.0)),
        ("a request fails that was sent although the host was left out", 1.0, 0.5, (False, 1, 1.0)),
    ],
)
def test_only_the_request_that_probes_a_host_decides_about_it(
    what: str, ejection: float, now: float, expected: tuple[bool, int, float]
) -> None:
    breaker = EJECTED.began()
    if what.endswith("to blame for"):
        breaker = breaker.failed(PeerLost(""), now, 1.0, ejection)
    elif "fails" in what:
        breaker = breaker.failed(ServerUnavailable(""), now, 1.0, ejection)
    else:
        breaker = breaker.ended(ejection)
    assert (breaker.probing, breaker.ejections, breaker.until) == expected


def test_the_first_token_of_the_probe_lets_others_in_and_the_next_failure_still_ejects_for_longer() -> None:
    answering = EJECTED.began().began_to_answer(ejection=1.0)
    assert answering.closed_for(1.5) == 0 and answering.began().closed_for(1.5) == 0
    assert answering.failed(ModelError(""), 2.0, 1.0, 1.0) == Breaker(answering.failures + 1, 2, 4.0)
    assert answering.succeeded() == CLOSED


def test_a_token_of_a_request_that_began_before_the_ejection_lets_nobody_in() -> None:
    assert EJECTED.began().began_to_answer(ejection=0.0) == EJECTED.began()


def test_requests_under_way_when_a_host_is_ejected_count_once() -> None:
    breaker = EJECTED
    for now in (0.1, 1.1, 5.0):
        breaker = breaker.failed(ServerUnavailable(""), now, jitter=1.0, ejection=0.0)
    assert breaker.ejections == 1 and breaker.until == 1.0


def test_a_success_closes_the_breaker() -> None:
    assert Breaker(failures=2).succeeded() == CLOSED


def body(*contents: str, salt: str = "", model: str = "m") -> GenerateBody:
    roles = ("user", "assistant") * len(contents)
    messages = tuple(ChatMessage(role, text) for role, text in zip(roles, contents, strict=False))
    return GenerateBody(model=model, messages=messages, cache_salt=salt)


def test_the_next_turn_of_a_conversation_is_found_on_the_host_that_answered() -> None:
    affinity, first = Affinity(), body("x" * 2000)
    content = content_of(first, "the answer " * 50)
    affinity.remember(chain(content, "m\0"), "mac-2", 700, len(content))
    held = affinity.held(prompt_of(body("x" * 2000, "the answer " * 50, "and?")).chain)
    assert held.keys() == {"mac-2"} and 600 < held["mac-2"] <= 700


@pytest.mark.parametrize(
    "other", [body("y" * 2000), body("x" * 2000, salt="tenant"), body("x" * 2000, model="n"), body("x" * 200)]
)
def test_other_prompts_tenants_and_models_share_nothing(other: GenerateBody) -> None:
    affinity, first = Affinity(), prompt_of(body("x" * 2000))
    affinity.remember(first.chain, "mac-2", 500, len(first.content))
    assert not affinity.held(prompt_of(other).chain)


def test_a_shorter_common_beginning_is_fewer_tokens() -> None:
    affinity = Affinity()
    content = bytes(8 * BLOCK_BYTES)
    affinity.remember(chain(content, ""), "a", 800, len(content))
    shorter = bytes(2 * BLOCK_BYTES) + b"\1" * BLOCK_BYTES
    assert affinity.held(chain(shorter, "")) == {"a": 200}


def test_token_prompts_are_compared_by_their_tokens() -> None:
    affinity, tokens = Affinity(), tuple(range(300))
    content = content_of(GenerateBody(model="m", tokens=tokens), answer_tokens=[1, 2, 3])
    affinity.remember(chain(content, "m\0"), "a", 303, len(content))
    again = prompt_of(GenerateBody(model="m", tokens=(*tokens, 1, 2, 3, 9)))
    assert again.tokens == 304 and affinity.held(again.chain)["a"] >= 250


def test_what_is_remembered_is_bounded_and_the_least_recent_goes_first() -> None:
    affinity = Affinity(limit=10)
    for number in range(100):
        affinity.remember((bytes([number]),), "a", 64, 256)
    assert len(affinity) == 10 and affinity.held((bytes([99]),)) and not affinity.held((bytes([0]),))
    for number in range(100):
        affinity.remember((b"x",), f"host-{number}", 64, 256)
    assert set(affinity.held((b"x",))) == {"host-96", "host-97", "host-98", "host-99"}


def test_after_a_refutation_only_kv_that_passes_an_audit_is_a_success() -> None:
    refuted = CLOSED.failed(KVRefuted(""), 0.0, 1.0, 0.0)
    assert refuted.succeeded() == refuted and refuted.succeeded(audited=True) == CLOSED
    assert EJECTED.succeeded() == CLOSED, "of any other failure every success is one"
    for _ in range(2):
        refuted = refuted.failed(KVRefuted(""), 0.0, 1.0, 0.0)
    probing = refuted.began()
    assert probing.closed_for(1.5) and not probing.succeeded().closed_for(1.5), "others may find out, too"
