"""Which stages are reported to a request's watcher, from what arrives of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from disagg.api.events import Event, LocalEvent, ProgressEvent, ShippedEvent, TokenLogprob, TokensEvent
from disagg.api.names import RequestPhase
from disagg.api.requests import GenerateBody
from disagg.config import EngineOptions, Host
from disagg.errors import DisaggError, ModelError, RequestError
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import ArrivingAnswer, phase_of
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.affinity import prompt_of
from disagg.inference.http import host_calls
from disagg.inference.types import Stage
from tests.fleets import TOKEN, RunningFleet
from tests.inference.scripted import Body, answering, client_of, scripted, silent, slot, tokens, whole

Events = AsyncGenerator[Event | DisaggError, None]
P = Host("p", "127.0.0.1", ("prefill",), "m", EngineOptions("simulated"), 1)
D = Host("d", "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 2)
HANDED_OFF = Attempt("disaggregated", D, P)


class Watcher:
    def __init__(self) -> None:
        self.stages: list[Stage] = []

    @property
    def phases(self) -> list[RequestPhase]:
        return [stage.phase for stage in self.stages]


def answer(watcher: Watcher) -> ArrivingAnswer:
    return ArrivingAnswer("m", 0.0, lambda _: None, watcher.stages.append)


@pytest.mark.parametrize(
    ("reported", "phase"),
    [
        ("tokenising", "queue"),
        ("queued", "queue"),
        ("computing the prompt", "prefill"),
        ("sending KV", "transfer"),
        ("generating", "decode"),
        ("waiting for KV", None),
        ("a phase of a later version", None),
    ],
)
def test_a_phase_that_a_host_reports_becomes_one_of_four(reported: str, phase: RequestPhase | None) -> None:
    assert phase_of(reported) == phase


def test_a_watcher_gets_each_stage_once_with_its_hosts_and_tokens() -> None:
    watcher = Watcher()
    one = answer(watcher)
    one.begin(HANDED_OFF, 0.0)
    one.enter("prefill", 100, 60)
    for phase in ("queued", "queued", "computing the prompt", "sending KV", "waiting for KV"):
        one.reported(phase)
    one.take(TokensEvent("a", (TokenLogprob(1, -0.1),)))
    one.reported("queued")  # of the prefill host, late
    assert watcher.phases == ["queue", "prefill", "queue", "prefill", "transfer", "decode"]
    assert watcher.stages[-1] == Stage("decode", "disaggregated", "p", "d", 100, 60)


def test_the_next_attempt_begins_in_the_queue_of_its_hosts() -> None:
    watcher = Watcher()
    one = answer(watcher)
    one.begin(HANDED_OFF, 0.0)
    one.enter("prefill", 100)
    one.begin(Attempt("fallback", D, None, "prefill failed"), 1.0)
    assert watcher.stages[-1] == Stage("queue", "fallback", None, "d", reason="prefill failed")


async def test_the_phases_of_progress_events_are_passed_on() -> None:
    reported: list[str] = []
    events = b"".join(
        b'event: progress\ndata: {"phase": "%s", "beats": 1}\n\n' % phase for phase in (b"queued", b"generating")
    )
    done = b'event: error\ndata: {"code": "ModelError", "message": "x", "hint": ""}\n\n'

    async with answering(events + done) as (http, host, _):
        call = host_calls.EventCall(host, "/generate", ProgressEvent(phase="", beats=0), "r", reported=reported.append)
        with pytest.raises(ModelError):
            async with host_calls.events(http, call) as stream:
                await stream.next()
    assert reported == ["queued", "generating"]


async def test_a_real_hand_off_is_seen_in_queue_prefill_and_decode(tiny_fleet: RunningFleet) -> None:

    watcher = Watcher()
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client:
        text = "stage " * 200
        async with client.stream("tiny", text, max_tokens=4, watch=watcher.stages.append) as stream:
            async for _ in stream:
                pass
    assert [watcher.phases[0], watcher.phases[-1]] == ["queue", "decode"] and "prefill" in watcher.phases
    assert watcher.stages[-1].prompt_tokens == stream.completion.metrics.prompt_tokens


@pytest.mark.parametrize("hold_prompt", [True, False])
async def test_the_host_of_a_held_prompt_is_remembered_when_its_first_tokens_arrive(hold_prompt: bool) -> None:
    async def begun(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        yield slot(body)
        yield tokens(1)
        async for event in silent(body):
            yield event

    prompt = list(range(200))
    async with (
        scripted(d1={"decode": begun}, d2={"decode": begun}, p={"prefill": silent}) as (fleet, hosts),
        AsyncClient(fleet, token=TOKEN) as client,
        client.stream("m", tokens=prompt, max_tokens=2, hold_prompt=hold_prompt) as stream,
    ):
        await anext(stream)
        held = client.view.affinity.held(prompt_of(GenerateBody(model="m", tokens=tuple(prompt))).chain)
    assert set(held) == ({name for name in ("d1", "d2") if hosts[name].asked} if hold_prompt else set())


@pytest.mark.parametrize("request_id", ["x" * 48, "a\nb", "a b", "é", "a\n"])
async def test_a_request_id_that_hosts_would_not_take_is_refused(request_id: str) -> None:
    async with scripted(d={}) as (fleet, _), AsyncClient(fleet, token=TOKEN) as client:
        client.stream("m", "x", request_id="A-b_c.9" * 6)
        with pytest.raises(RequestError, match="request_id: at most 47"):
            client.stream("m", "x", request_id=request_id)


async def test_an_answer_that_goes_on_elsewhere_has_the_ttft_parts_of_the_hosts_that_brought_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped, closing_event = asyncio.Event(), host_calls.closing_event

    async def noted(*arguments: Any) -> Any:
        event = await closing_event(*arguments)
        shipped.set()
        return event

    async def breaks_off(body: Body) -> Events:
        yield slot(body)
        await shipped.wait()
        yield tokens(0)
        yield ModelError("out of memory")

    async def goes_on(body: Body) -> Events:
        yield LocalEvent(request_id="r", prompt_tokens=2, held_tokens=0, reason="short")
        async for event in whole(body):
            yield event

    async def ships(_: Body) -> Events:
        yield ShippedEvent(
            prompt_tokens=2,
            computed_tokens=1,
            kv_bytes=1,
            kv_wire="as-is",
            tokenise_s=0.0,
            queue_s=0.0,
            compute_s=2**-20,
            hidden_transfer_s=0.0,
            exposed_transfer_s=0.0,
        )

    monkeypatch.setattr(host_calls, "closing_event", noted)
    d1, d2, p1 = {"decode": breaks_off}, {"decode": goes_on}, {"prefill": ships}
    async with client_of(d1=d1, d2=d2, p1=p1) as (client, _):
        metrics = (await client.generate("m", tokens=[1, 2], max_tokens=3, timeout=600)).metrics
    assert metrics.decode_server == "d2" and metrics.resumed_tokens == 1
    assert metrics.ttft_parts.prefill == 2**-20 and metrics.ttft_parts.failed_attempts == 0.0
    assert metrics.ttft_parts.total == pytest.approx(metrics.ttft)
