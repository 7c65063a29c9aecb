"""Scores of prompts through the client: the hosts that are asked, what they give, what of it is believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from disagg.api.events import Event, PromptToken, ScoredEvent, ScoresEvent
from disagg.api.requests import GenerateBody
from disagg.errors import (
    CapabilityMissing,
    ContextLengthExceeded,
    DisaggError,
    InvalidAnswer,
    Overloaded,
    RequestError,
    ServerSilent,
)
from disagg.inference.attempts import score
from disagg.inference.attempts.driver import Driver, GenerationRequest
from disagg.inference.client import Client
from disagg.inference.hosts.route import Candidates
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.types import Stage
from disagg.servers.output.scores import PromptScores
from disagg.token import Tokens
from tests.deadlines import wait_until
from tests.fleets import RunningFleet
from tests.inference.scripted import described_host

PROMPT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def client(tiny_fleet: RunningFleet) -> Any:
    with tiny_fleet.client() as client:
        yield client


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_host_scores_a_prompt_as_transformers_alone_does(client: Client, tiny_fleet: RunningFleet, role: Any) -> None:
    scores = client.score("tiny", PROMPT, top=2, alone=role)
    ids = [token.id for token in scores.tokens]
    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny_fleet.fleet.models["tiny"].sources["transformers"], dtype=torch.float32
    )
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    first, *rest = scores.tokens
    assert b"".join(token.bytes for token in scores.tokens) == PROMPT.encode()
    assert (first.logprob, first.rank, first.top) == (None, None, ())
    for row, token in zip(rows, rest, strict=False):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [value for _, value in token.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert len(token.top_bytes) == 2 and all(token.top_bytes)
        assert token.rank == 1 if token.id == token.top[0][0] else (token.rank or 0) > 1
    metrics = scores.metrics
    assert (metrics.method, metrics.prompt_tokens, metrics.completion_tokens) == (f"{role}-alone", len(ids), 0)
    assert metrics.prefill_time > 0


def test_a_prefill_host_is_asked_first_and_keeps_nothing(client: Client, tiny_fleet: RunningFleet) -> None:
    before = tiny_fleet.status("tiny-prefill")
    scores = client.score("tiny", PROMPT + "# kept nowhere")
    after = tiny_fleet.status("tiny-prefill")
    assert scores.metrics.prefill_server == "tiny-prefill"
    computed = after["counters"]["computed_prompt_tokens"] - before["counters"]["computed_prompt_tokens"]
    assert computed == len(scores.tokens) - 1
    assert after["kv_held_bytes"] == before["kv_held_bytes"] and after["running"] == 0


def test_many_prompts_wait_for_their_turn(client: Client) -> None:
    async def all_of_them() -> list[float]:
        prompts = [f"{PROMPT}# {number}" for number in range(24)]
        scored = await asyncio.gather(*(asyncio.to_thread(client.score, "tiny", one) for one in prompts))
        return [sum(token.logprob or 0 for token in one.tokens) for one in scored]

    assert len(set(asyncio.run(all_of_them()))) == 24


def test_what_cannot_be_scored_is_refused(client: Client) -> None:
    for top in (-1, 21):
        with pytest.raises(RequestError, match="top: 0 to 20"):
            client.score("tiny", PROMPT, top=top)
    with pytest.raises(ContextLengthExceeded):
        client.score("tiny", tokens=[7] * 4096)


@pytest.mark.parametrize("host", ["tiny-prefill", "tiny-decode"])
def test_a_prompt_that_was_scored_or_is_late_leaves_nothing_behind(tiny_fleet: RunningFleet, host: str) -> None:
    with tiny_fleet.http(host) as http:
        assert "event: scored" in http.post("/score", json={"model": "tiny", "tokens": [7, 8] * 9}).text
        late = http.post("/score", json={"model": "tiny", "tokens": [7, 8] * 2000, "deadline_s": 0.01})
        assert "DeadlineExceeded" in late.text
        wrong = http.post("/score", json={"model": "tiny", "prompt": "x", "answer_tokens": [7]})
        assert wrong.status_code == 400 and "a prompt is scored" in wrong.text
    wait_until(lambda: (tiny_fleet.status(host)["running"], tiny_fleet.status(host)["kv_bytes"]) == (0, 0))


def test_more_log_probabilities_than_the_bound_are_refused_before_any_is_computed() -> None:
    with pytest.raises(RequestError, match="over 524288"):
        PromptScores([0] * 30_000, 20, lambda token: b"")
    assert len(list(PromptScores([7], 20, lambda token: b"a").events())) == 1


# Which host is asked, and what is believed: with scripted hosts.

D1, P1, P2 = (described_host(name, 1) for name in ("d1", "p1", "p2"))
TOKENS = (PromptToken(7, b"a"), PromptToken(8, b"b", -1.5, 2, ((9, -1.0),), (b"c",)))
SCORED = ScoredEvent(prompt_tokens=2, tokenise_s=0.0, queue_s=0.0, compute_s=0.0)
GOOD: tuple[Event, ...] = (ScoresEvent(TOKENS), SCORED)
UNABLE, BUSY = CapabilityMissing("no scores"), Overloaded("busy")


async def asked(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[DisaggError | tuple[Event, ...]]]
) -> tuple[list[str], Any]:
    """The hosts that are asked, and the result or the error."""
    seen: list[str] = []

    class Events:
        def __init__(self, events: tuple[Event, ...]) -> None:
            self._events = events

        async def to_end(self, take: Any) -> Any:
            return next(result for event in self._events if (result := take(event)) is not None)

    @asynccontextmanager
    async def events(_: object, call: host_calls.EventCall) -> AsyncIterator[Events]:
        seen.append(call.host.name)
        given = answers[call.host.name]
        answer = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(answer, DisaggError):
            raise answer
        yield Events(answer)

    async def soon(_: float) -> None:
        pass

    monkeypatch.setattr(host_calls, "events", events)
    monkeypatch.setattr(asyncio, "sleep", soon)
    driver = Driver(Connections(Tokens("a-token")))
    candidates = Candidates("m", (D1,), (P1, P2), context=8)
    request = GenerationRequest(candidates, GenerateBody(model="m", tokens=(7, 8)), time.monotonic())
    stages: list[Stage] = []
    try:
        return seen, await score.score(driver, request, 1, stages.append)
    except DisaggError as error:
        return seen, error
    finally:
        await driver.close()


async def test_the_decode_host_is_asked_if_no_prefill_host_can(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, scores = await asked(monkeypatch, {"p1": [UNABLE], "p2": [UNABLE], "d1": [GOOD]})
    assert (seen, scores.tokens, scores.metrics.decode_server) == (["p1", "p2", "d1"], TOKENS, "d1")


async def test_busy_hosts_are_asked_again_also_if_another_is_unable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, scores = await asked(monkeypatch, {"p1": [BUSY, BUSY, GOOD], "p2": [UNABLE], "d1": [UNABLE]})
    assert (seen, scores.tokens) == (["p1", "p2", "d1"] * 2 + ["p1"], TOKENS)


async def test_a_busy_host_is_waited_for_if_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = ServerSilent("no answer")
    seen, scores = await asked(monkeypatch, {"p1": [BUSY, GOOD], "p2": [silent], "d1": [UNABLE]})
    assert (seen, scores.tokens) == (["p1", "p2", "d1", "p1"], TOKENS)


async def test_a_model_that_no_host_can_score_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, error = await asked(monkeypatch, {"p1": [UNABLE], "p2": [UNABLE], "d1": [UNABLE]})
    assert isinstance(error, CapabilityMissing)


WRONG: list[tuple[Event, ...]] = [
    (ScoresEvent(TOKENS[:1]), SCORED),
    (ScoresEvent((TOKENS[0], PromptToken(9, b"b", -1.5, 2, ((9, -1.0),), (b"c",)))), SCORED),
    (ScoresEvent((TOKENS[0], PromptToken(8, b"b"))), SCORED),
    (ScoresEvent((TOKENS[0], PromptToken(8, b"b", -1.5, 2, ((9, -1.0), (7, -2.0)), (b"c", b"a")))), SCORED),
    (ScoresEvent(TOKENS * 5), SCORED),
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_contradicts_the_request_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[Event, ...]
) -> None:
    seen, scores = await asked(monkeypatch, {"p1": [wrong], "p2": [GOOD], "d1": [GOOD]})
    assert (seen, scores.tokens) == (["p1", "p2"], TOKENS)
    _, error = await asked(monkeypatch, {"p1": [wrong], "p2": [wrong], "d1": [wrong]})
    assert isinstance(error, InvalidAnswer)
