"""disagg/servers/host/service.py and both roles, without HTTP or a model: how requests begin, end and are counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.api.events import DoneEvent, Event, SlotEvent, TokensEvent
from disagg.api.requests import CountBody, DecodeBody, GenerateBody, PromptBody, Share
from disagg.api.sampling import Sampling
from disagg.api.status import CountAnswer
from disagg.config import load
from disagg.engines.simulated.model import ByteTokenizer
from disagg.engines.simulated.prefill import _AnswerRun
from disagg.errors import Cancelled, ContextLengthExceeded, ModelError, Overloaded, UnknownModel
from disagg.servers.host.request import Caller
from disagg.servers.host.service import AnyService
from disagg.servers.run import make_service
from tests.simulated import write_simulated
from tests.values import present

PATIENCE_S = 60.0


@asynccontextmanager
async def serving(tmp_path: Path, host: str) -> AsyncIterator[AnyService]:
    """The service of a simulated host, which begins and ends quickly: few random bytes, and a receiver that looks often
    whether it is closed."""
    fleet = load(write_simulated(tmp_path))
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr("disagg.engines.simulated.prefill.NOISE_BYTES", 1 << 20)
        quick.setattr("disagg.kv.receive.server.SWEEP_S", 0.01)
        service = make_service(fleet, fleet.hosts[host])
        await service.load()
        yield service
        await service.close()


@pytest.fixture
async def prefill(tmp_path: Path) -> AsyncIterator[AnyService]:
    async with serving(tmp_path, "m-prefill") as service:
        yield service


@pytest.fixture
async def decode(tmp_path: Path) -> AsyncIterator[AnyService]:
    async with serving(tmp_path, "m-decode") as service:
        yield service


def answer(
    service: AnyService, path: str, body: PromptBody, caller: Caller | None = None
) -> AsyncGenerator[Event, None]:
    (endpoint,) = (one for one in service.endpoints() if one.path == path)
    return endpoint.events(body, caller or Caller("the-request"))


def idle(service: AnyService) -> bool:
    status = service.status()
    return (status.queue, status.running, status.kv_bytes) == (0, 0, 0)


async def until_idle(service: AnyService) -> None:
    """Wait until the host holds nothing: an engine's thread releases KV a moment after the last event."""
    async with asyncio.timeout(PATIENCE_S):
        while not idle(service):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("host", ["m-prefill", "m-decode"])
async def test_a_generated_answer_is_tokens_and_one_done_event(tmp_path: Path, host: str) -> None:
    body = GenerateBody(model="m", prompt="hello", sampling=Sampling(max_tokens=5))
    async with serving(tmp_path, host) as service:
        async with asyncio.timeout(PATIENCE_S):
            *tokens, done = [event async for event in answer(service, "/generate", body)]
        counters = service.status().counters
        assert (counters.requests, counters.completed, counters.completion_tokens) == (1, 1, 5)
        await until_idle(service)
    assert isinstance(done, DoneEvent) and done.completion_tokens == 5 and done.finish_reason == "length"
    assert sum(len(event.tokens) for event in tokens if isinstance(event, TokensEvent)) == 5


@pytest.mark.parametrize("bug", [RuntimeError("out of memory"), ValueError("temperature"), MemoryError()])
@pytest.mark.parametrize("where", ["start_answer", "step"])
async def test_a_bug_in_the_engine_ends_its_request_at_once(
    prefill: AnyService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    bug: Exception,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise bug

    owner = prefill.engine if where == "start_answer" else _AnswerRun
    with monkeypatch.context() as patched:
        patched.setattr(owner, where, fail)
        with pytest.raises(ModelError, match=type(bug).__name__):
            async with asyncio.timeout(PATIENCE_S):
                async for _ in answer(prefill, "/generate", GenerateBody(model="m", prompt="hello")):
                    pass
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["engine_failed"]
    status = prefill.status()
    assert status.counters.failed == 1 and present(status.last_error).code == "ModelError"
    async with asyncio.timeout(PATIENCE_S):
        *_, done = [event async for event in answer(prefill, "/generate", GenerateBody(model="m", prompt="hello"))]
        while not idle(prefill):
            await asyncio.sleep(0.01)
    assert isinstance(done, DoneEvent)


async def test_an_abandoned_slot_is_released_and_counted_as_cancelled(decode: AnyService) -> None:
    events = answer(decode, "/decode", DecodeBody(model="m", prompt="hello"))
    slot = await anext(events)
    assert isinstance(slot, SlotEvent) and slot.request_id == "the-request" and not idle(decode)
    await events.aclose()
    assert decode.status().counters.cancelled == 1 and idle(decode)


async def test_an_answer_that_nobody_reads_holds_nothing(decode: AnyService) -> None:
    answer(decode, "/decode", DecodeBody(model="m", prompt="hello"))
    assert decode.status().counters.requests == 0 and idle(decode)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (GenerateBody(model="other", prompt="x"), UnknownModel),
        (GenerateBody(model="m", prompt="x", sampling=Sampling(max_tokens=20_000)), ContextLengthExceeded),
    ],
)
async def test_a_refused_request_is_not_counted(decode: AnyService, body: GenerateBody, error: type[Exception]) -> None:
    with pytest.raises(error):
        await anext(answer(decode, "/generate", body))
    counters = decode.status().counters
    assert (counters.requests, counters.failed) == (0, 0) and idle(decode)


async def test_a_draining_server_refuses_work(decode: AnyService) -> None:
    decode.state = "draining"
    with pytest.raises(Overloaded, match="m-decode is draining"):
        await anext(answer(decode, "/generate", GenerateBody(model="m", prompt="x")))
    assert decode.health().status == "draining"


async def test_a_request_whose_lease_is_not_extended_ends_as_cancelled(decode: AnyService) -> None:
    caller = Caller("the-request")
    events = answer(decode, "/decode", DecodeBody(model="m", prompt="hello", lease_s=5.0), caller)
    await anext(events)
    assert decode.extend_leases(["the-request", "another"]).unknown == ("another",)
    decode.leases.expire(time.monotonic() + 4.0)
    assert caller.error is None
    decode.leases.expire(time.monotonic() + 6.0)
    assert isinstance(caller.error, Cancelled) and "lease" in caller.error.message
    await events.aclose()
    assert decode.status().counters.cancelled == 1 and idle(decode)
    assert decode.extend_leases(["the-request"]).unknown == ("the-request",)


async def test_load_states_what_routing_needs(decode: AnyService) -> None:
    before = decode.load_figures()
    events = answer(decode, "/decode", DecodeBody(model="m", prompt="hello"))
    await anext(events)
    load = decode.load_figures()
    assert (load.status, load.boot_id, load.queue + load.running) == ("ok", decode.health().boot_id, 1)
    assert load.queue_tokens > 0 == before.queue_tokens and load.running_limit > 0
    await events.aclose()
    assert decode.load_figures() == before


async def test_tokens_of_a_prompt_are_counted_within_the_queue(decode: AnyService) -> None:
    body = CountBody(model="m", tokens=(9, 10, 11))
    assert await decode.count_tokens(body) == CountAnswer(3)
    listed = await decode.count_tokens(CountBody(model="m", prompt="hé", list_tokens=True))
    assert (listed.prompt_tokens, b"".join(listed.texts)) == (len(listed.tokens), "hé".encode())
    assert idle(decode)
    with ExitStack() as places:
        with pytest.raises(Overloaded):
            while True:
                decode._admission.take_place(Share(), places)
        with pytest.raises(Overloaded, match="queue is full"):
            await decode.count_tokens(body)
    with pytest.raises(UnknownModel):
        await decode.count_tokens(CountBody(model="other", tokens=(9,)))


async def test_counts_have_a_quarter_of_the_places_so_that_requests_find_one(
    decode: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = asyncio.Event()

    async def tokenise(_: PromptBody) -> list[int]:
        await counted.wait()
        return [9]

    monkeypatch.setattr(decode, "_tokenise", tokenise)
    body, places = CountBody(model="m", tokens=(9,)), decode._admission.limit
    counting = [asyncio.ensure_future(decode.count_tokens(body)) for _ in range(places)]
    async with asyncio.timeout(PATIENCE_S):
        while sum(one.done() for one in counting) < places - max(1, places // 4):
            await asyncio.sleep(0)
    counted.set()
    ends = await asyncio.gather(*counting, return_exceptions=True)
    assert [isinstance(end, Overloaded) for end in ends].count(False) == max(1, places // 4)
    assert (await decode.count_tokens(body)).prompt_tokens == 1 and idle(decode)


@pytest.mark.parametrize("host", ["m-prefill", "m-decode"])
async def test_what_a_tokenizer_makes_on_first_use_is_made_before_the_first_request_and_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    threads: list[int] = []

    def note(one: ByteTokenizer, *token: int) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr(ByteTokenizer, "format", property(note))
    monkeypatch.setattr(ByteTokenizer, "token_bytes", note)
    async with serving(tmp_path, host):
        assert len(threads) == 2 and threading.get_ident() not in threads
