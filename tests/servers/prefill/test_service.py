"""disagg/servers/prefill/service.py with a simulated engine, and decode hosts that are only a KV port."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from disagg.api.events import DoneEvent, Event, ShippedEvent, TokensEvent
from disagg.api.requests import GenerateBody, KVAddress, PrefillBody
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions, load
from disagg.engines.base import PrefillEngine, PrefillRun, PrefillTiming
from disagg.errors import DeadlineExceeded, Overloaded, RequestError
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.sent import ComputeStep, LinkWait, SentKV
from disagg.kv.transfer import SendLimits
from disagg.servers.host.request import Caller
from disagg.servers.prefill import service as services
from disagg.servers.prefill.service import PrefillService
from disagg.servers.run import make_service
from tests.ports import free_ports
from tests.servers.host.test_service import answer
from tests.simulated import write_simulated
from tests.values import of_type

PATIENCE_S = 60.0
PROMPT = list(range(5, 305))


@asynccontextmanager
async def serving(tmp_path: Path, hardware: str = "h200-sxm") -> AsyncIterator[PrefillService]:
    """The prefill host of a fleet with two decode hosts, m-decode and m-other."""
    path = write_simulated(tmp_path, prefill=hardware)
    port, kv_port = free_ports(2)
    other = path.read_text().partition("[hosts.m-decode]")[2]
    lines = [f"kv_port = {kv_port}" if line.startswith("kv_port") else line for line in other.splitlines()]
    lines = [f"port = {port}" if line.startswith("port") else line for line in lines]
    text = "\n".join(lines).replace('roles = ["decode"]\nport', 'roles = ["decode"]\nport')
    path.write_text(path.read_text() + "[hosts.m-other]" + text)
    fleet = load(path)
    service = of_type(make_service(fleet, fleet.hosts["m-prefill"]), PrefillService)
    await service.load()
    try:
        yield service
    finally:
        await service.close()


@dataclass(slots=True)
class Receiver:
    """The KV port of a decode host."""

    service: PrefillService
    to: KVAddress
    tickets: Tickets
    outcomes: queue.Queue[KVOutcome]

    def body(self, tokens: list[int], start: int = 0, answered: int = 0, salt: str = "") -> PrefillBody:
        """answered: how many of `tokens`, the last ones, belong to the answer."""
        info = self.service.engine.info
        expected = Expected("r", info.layout, info.fingerprint, token_hash(tokens), len(tokens) - 1, start)
        slot = self.tickets.issue(expected, self.outcomes.put, deadline=time.monotonic() + PATIENCE_S)
        prompt = len(tokens) - answered
        return PrefillBody(
            model="m",
            tokens=tuple(tokens[:prompt]),
            answer_tokens=tuple(tokens[prompt:]),
            deliver=self.to,
            ticket=slot.ticket,
            start=start,
            cache_salt=salt,
        )

    def received(self) -> ReceivedKV:
        return of_type(self.outcomes.get(timeout=PATIENCE_S), ReceivedKV)


@contextmanager
def receiving(service: PrefillService, name: str = "m-decode") -> Iterator[Receiver]:
    to = address(service, name)
    tickets = Tickets()
    with KVServer(to.host, to.port, tickets):
        yield Receiver(service, to, tickets, queue.Queue())


@contextmanager
def frozen(service: PrefillService, name: str) -> Iterator[KVAddress]:
    """A KV port that accepts connections and reads nothing, as that of a stopped process does."""
    to = address(service, name)
    with socket.create_server((to.host, to.port)):
        yield to


def address(service: PrefillService, name: str) -> KVAddress:
    host = service.fleet.hosts[name]
    assert host.kv_port is not None
    return KVAddress(host.kv_address, host.kv_port)


def prefill(service: PrefillService, body: PrefillBody) -> AsyncGenerator[Event, None]:
    return answer(service, "/prefill", body, Caller("r"))


async def shipped(service: PrefillService, body: PrefillBody) -> ShippedEvent:
    async with asyncio.timeout(PATIENCE_S):
        (event,) = [event async for event in prefill(service, body)]
    return of_type(event, ShippedEvent)


async def test_only_the_rows_that_the_decode_host_lacks_are_sent(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        layout = service.engine.info.layout
        with receiving(service) as receiver:
            event = await shipped(service, receiver.body(PROMPT, start=200))
            kv = receiver.received()
        assert (kv.start, kv.tokens) == (200, 299)
        assert event.kv_bytes == layout.nbytes(299, 200)
        assert (event.computed_tokens, event.held_tokens, event.prompt_tokens) == (299, 0, 300)
        with pytest.raises(RequestError, match="start: 300 is not within"):
            await shipped(
                service, PrefillBody(model="m", tokens=(1,) * 300, deliver=kv_port(service), ticket="x" * 43, start=300)
            )


def kv_port(service: PrefillService) -> KVAddress:
    return address(service, "m-decode")


async def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_there_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        with receiving(service) as receiver:
            for prompt, salt, held in ((PROMPT, "", 0), (PROMPT + [9] * 50, "", 299), (PROMPT, "other", 0)):
                event = await shipped(service, receiver.body(prompt, salt=salt))
                assert (event.held_tokens, event.computed_tokens) == (held, len(prompt) - 1 - held)
                assert receiver.received().tokens == len(prompt) - 1
        assert service.load_figures().kv_held_bytes == service.engine.held_bytes > 0


async def test_an_answer_that_another_host_began_is_part_of_the_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        with receiving(service) as receiver:
            body = receiver.body([*PROMPT, 7, 8], answered=2)
            event = await shipped(service, body)
            assert receiver.received().tokens == len(PROMPT) + 1
        assert (event.prompt_tokens, event.computed_tokens) == (len(PROMPT), len(PROMPT) + 1)


async def test_a_generated_answer_goes_on_after_the_tokens_of_another_host(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:

        async def ids(*given: int) -> list[int]:
            body = GenerateBody(model="m", tokens=tuple(PROMPT), answer_tokens=given, sampling=Sampling(max_tokens=10))
            *tokens, done = [event async for event in answer(service, "/generate", body, Caller("r"))]
            finished = of_type(done, DoneEvent)
            assert (finished.completion_tokens, finished.prompt_tokens) == (10, len(PROMPT))
            return [token.id for event in tokens for token in of_type(event, TokensEvent).tokens]

        whole = await ids()
        assert await ids(*whole[:4]) == whole[4:]
        assert await ids(*whole) == []


async def test_a_frozen_decode_host_holds_up_no_prompt_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.kv.transfer.SendLimits", partial(SendLimits, answer_s=PATIENCE_S))
    async with serving(tmp_path) as service:
        with frozen(service, "m-other") as to, receiving(service) as receiver:
            stuck = [
                asyncio.ensure_future(
                    shipped(service, PrefillBody(model="m", tokens=(n, *PROMPT), deliver=to, ticket="x" * 43))
                )
                for n in range(10)
            ]
            async with asyncio.timeout(PATIENCE_S):
                while service.figures().kv_bytes == 0:
                    await asyncio.sleep(0.01)
            await shipped(service, receiver.body(PROMPT))
            assert not any(one.done() for one in stuck)
            for one in stuck:
                one.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            await until_idle(service)


async def until_idle(service: PrefillService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (service.figures().kv_bytes, service.figures().queue_tokens, service.status().running) != (0, 0, 0):
            await asyncio.sleep(0.01)


async def test_a_request_ends_at_its_deadline_even_if_the_engine_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def stuck(*_: Any, **__: Any) -> PrefillRun:
        go_on.wait(PATIENCE_S)
        raise RuntimeError("let go")

    async with serving(tmp_path) as service:
        monkeypatch.setattr(service.engine, "start_answer", stuck)
        body = GenerateBody(model="m", prompt="x", deadline_s=0.2)
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(PATIENCE_S):
                await anext(answer(service, "/generate", body, Caller("r")))
        assert service.busy
        go_on.set()
        await until_idle(service)


async def test_a_draining_host_refuses_what_has_not_begun_and_finishes_the_rest(tmp_path: Path) -> None:
    async with serving(tmp_path, "m4-max") as service:
        running, queued = Caller("r"), Caller("q")
        long = GenerateBody(model="m", tokens=tuple([9] * 2000), sampling=Sampling(max_tokens=5))
        answer = asyncio.ensure_future(collect(service, long, running))
        async with asyncio.timeout(PATIENCE_S):
            while not service.busy:
                await asyncio.sleep(0.001)
            waiting = asyncio.ensure_future(collect(service, long, queued))
            while len(service.active) < 2 or running.phase == "queued":
                await asyncio.sleep(0.001)
            service.drain()
            assert isinstance(queued.error, Overloaded) and running.error is None
            waiting.cancel()
            assert isinstance((await answer)[-1], DoneEvent)
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await until_idle(service)


async def collect(service: PrefillService, body: GenerateBody, caller: Caller | None = None) -> list[Event]:
    return [event async for event in answer(service, "/generate", body, caller or Caller("r"))]


@pytest.mark.parametrize(
    ("engine", "limit"),
    [
        (EngineOptions("vllm", kv_cache_memory_bytes=32 << 30), 32 << 30),
        (EngineOptions("vllm", kv_cache_memory_bytes=32 << 30, tensor_parallel=2), 64 << 30),
        (EngineOptions("simulated", max_kv_bytes=5 << 30), 5 << 30),
        (EngineOptions("transformers"), 8 << 30),
    ],
)
async def test_the_kv_of_started_prompts_is_bounded_by_what_the_engine_holds(
    tmp_path: Path, engine: EngineOptions, limit: int
) -> None:
    fleet = load(write_simulated(tmp_path))
    service = PrefillService(fleet, replace(fleet.hosts["m-prefill"], engine=engine), lambda: pytest.fail("not loaded"))
    assert service.figures().kv_limit == limit
    await service.close()


@pytest.mark.parametrize(("has", "limit"), [(None, 8 << 30), (1 << 20, 1 << 20), (16 << 30, 8 << 30)])
async def test_prompts_are_begun_within_what_the_engine_states_that_it_has(
    tmp_path: Path, has: int | None, limit: int
) -> None:
    path = write_simulated(tmp_path)
    fleet = load(path)
    made = of_type(make_service(fleet, fleet.hosts["m-prefill"]), PrefillService)

    def make_engine() -> PrefillEngine:
        engine = made._make_engine()
        engine.info = replace(engine.info, kv_bytes=has)
        return engine

    service = PrefillService(fleet, made.host, make_engine)
    await service.load()
    try:
        assert service.figures().kv_limit == limit
    finally:
        await service.close()


class ToldLater:
    """A Delivery by an engine whose prompt was computed for 7 s, as it knows once the KV is sent; until then, 9 s."""

    remaining, held, done, reported = 0, 0, True, False

    def __init__(self) -> None:
        self.began = time.monotonic()

    @property
    def timing(self) -> PrefillTiming:
        seconds = 7.0 if self.reported else 9.0
        return PrefillTiming(self.began, 2, (ComputeStep(self.began, self.began + seconds),))

    def start(self) -> ToldLater:
        return self

    def finish(self, timing: PrefillTiming, waits: Sequence[LinkWait]) -> SentKV:
        self.reported = True
        return SentKV(70, 0.1, 0.2, None, timing.ended)

    def queued_bytes(self) -> int:
        return 0

    def starved(self) -> bool:
        return False

    def end(self) -> None: ...

    def close(self) -> None: ...


async def test_the_time_of_a_prompt_is_what_its_engine_knows_once_its_kv_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as service:
        monkeypatch.setattr(services, "delivery_by", lambda _: lambda *args, **options: ToldLater())
        with receiving(service) as receiver:
            event = await shipped(service, receiver.body([5, 6, 7]))
    assert (event.compute_s, event.computed_tokens, event.kv_bytes) == (7.0, 2, 70)
