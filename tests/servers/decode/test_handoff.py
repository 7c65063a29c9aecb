"""disagg/servers/decode/handoff.py: prompts that both hosts compute, and prefill hosts that fail in mid-prompt. The
engine of a prefill host sends real transfers to a real listener."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from functools import cache, partial
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.api.events import DoneEvent, Event, LocalEvent, SlotEvent, TokensEvent
from disagg.api.names import KV_CHUNKS
from disagg.api.requests import DecodeBody, PrefillOffer, Share
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions, Fleet, load
from disagg.engines.base import PrefillRun
from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.errors import DisaggError, PeerLost, RequestError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.transfer import Transfer
from disagg.servers.decode.audits import NEW, Audits
from disagg.servers.decode.handoff import SlotTerms, SlotWaits
from disagg.servers.decode.service import DecodeService
from disagg.servers.decode.spans import Spans
from disagg.servers.host.request import Caller
from tests.simulated import ROW_BYTES, write_simulated
from tests.values import of_type, present

PATIENCE_S = 60.0
LAYERS, CHUNK = 8, 16
PROMPT = tuple(range(100, 180))
DIVIDES = PrefillOffer(tokens_s=1e6, splits=True, kv_version=KV_CHUNKS, alone=False)
DECODE = DecodeBody(model="m", tokens=PROMPT, sampling=Sampling(max_tokens=4), prefill=DIVIDES, sender="p-1")
DIVIDED = replace(DECODE, split=6)
BOTH = pytest.mark.parametrize("body", [DIVIDED, replace(DECODE, split=LAYERS)], ids=["divided", "handed off"])


@pytest.fixture
def next_s() -> float:
    return SlotWaits().next_s


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return load(write_simulated(tmp_path_factory.mktemp("fleet"), chunk_tokens=CHUNK))


@cache
def prefill_engine(source: str, context: int) -> SimulatedPrefillEngine:
    return SimulatedPrefillEngine(source, context, EngineOptions("simulated", chunk_tokens=CHUNK), "h200-sxm")


@pytest.fixture
async def service(fleet: Fleet, next_s: float) -> AsyncIterator[DecodeService]:
    host, model = fleet.hosts["m-decode"], fleet.models["m"]
    options = dataclasses.replace(host.engine, max_kv_bytes=1000 * ROW_BYTES)
    make = partial(
        SimulatedDecodeEngine, model.sources.get(options.name, ""), model.context, options, present(host.hardware)
    )
    made = DecodeService(fleet, dataclasses.replace(host, engine=options), make, SlotWaits(next_s=next_s))
    await made.load()
    yield made
    await made.close()


class Sender:
    """A prefill host that computes what a slot is for, chunk by chunk."""

    def __init__(self, service: DecodeService, slot: SlotEvent, name: str = "p-1") -> None:
        model, info = service.model, service.engine.info
        self._engine = prefill_engine(model.sources.get("simulated", ""), model.context)
        layers = slot.layers or LAYERS
        self._header = Header(
            ticket=slot.ticket,
            request_id=slot.request_id,
            fingerprint=info.fingerprint,
            layout=info.split.head(info.layout, layers),
            token_hash=token_hash(PROMPT),
            tokens=len(PROMPT) - 1,
            start=slot.held_tokens,
            sender=name,
            chunks=True,
            layers=slot.layers,
            hidden=info.split.hidden if slot.layers else 0,
        )
        self._to = slot.kv.host, slot.kv.port
        self._layers = layers
        self._transfer: Transfer | None = None
        self._run: PrefillRun | None = None

    async def send(self, chunks: int) -> None:
        """Compute and send so many chunks."""
        await asyncio.to_thread(self._send, chunks)

    async def send_all(self) -> None:
        """Compute and send what is left."""
        await self.send(len(PROMPT))
        await asyncio.to_thread(present(self._transfer).finish)

    def _send(self, chunks: int) -> None:
        if self._run is None:
            self._transfer = Transfer(*self._to, self._header, deadline=time.monotonic() + PATIENCE_S)
            self._run = self._engine.start(
                PROMPT[:-1],
                self._transfer.send,
                start=self._header.start,
                salt=self._header.ticket,  # nothing is held
                layers=self._layers,
            )
        for _ in range(chunks):
            if not self._run.done:
                self._run.step()

    async def fail(self) -> None:
        """End as a process does that is killed."""
        await asyncio.to_thread(present(self._transfer).abort)

    @property
    def failed(self) -> DisaggError | None:
        return present(self._transfer).failed


def ask(service: DecodeService, body: DecodeBody) -> AsyncGenerator[Event, None]:
    (endpoint,) = (one for one in service.endpoints() if one.path == "/decode")
    return endpoint.events(body, Caller("the-request"))


async def slot_of(events: AsyncGenerator[Event, None]) -> SlotEvent:
    return of_type(await anext(events), SlotEvent)


async def came_whole(service: DecodeService, tokens: int) -> None:
    """Until chunks of so many tokens have come whole."""
    (issued,) = service.tickets._issued.values()
    async with asyncio.timeout(PATIENCE_S):
        while present(issued.incoming.arriving).whole < tokens:
            await asyncio.sleep(0.005)


async def idle(service: DecodeService) -> None:
    """Until nothing is held any more; fails if that takes too long."""
    async with asyncio.timeout(PATIENCE_S):
        while (load := service.load_figures()).queue or load.running or load.kv_bytes:
            await asyncio.sleep(0.01)
    assert service.tickets.outstanding == 0 and service.engine.running == 0


@BOTH
async def test_what_a_prefill_host_computes_of_a_prompt_and_what_this_one_make_one_answer(
    service: DecodeService, body: DecodeBody
) -> None:
    divided = body.split == 6
    async with aclosing(ask(service, body)) as events:
        slot = await slot_of(events)
        assert (slot.layers, slot.kv_version, slot.held_tokens) == (6 if divided else None, KV_CHUNKS, 0)
        assert slot.reason == f"split = {body.split}"
        sender = Sender(service, slot)
        sending = asyncio.ensure_future(sender.send_all())
        rest = [event async for event in events]
        await sending
    done = of_type(rest[-1], DoneEvent)
    assert (done.layers, done.resumed_at, done.computed_prompt_tokens) == (slot.layers, None, 1)
    assert (done.completion_tokens, done.local, done.kv_wire) == (4, "", "as-is")
    assert (done.timing.tail_compute_s > 0) == divided and done.timing.kv_wait_s > 0
    assert not any(isinstance(event, LocalEvent | SlotEvent) for event in rest)
    assert (service.load_figures().prefill_tokens_s is not None) == divided, "two layers of eight show the speed of all"
    await idle(service)


@pytest.mark.parametrize("body", [DIVIDED, replace(DECODE, split=0)], ids=["divided", "alone"])
async def test_what_chunks_need_beside_the_kv_is_free_once_the_prompt_is_computed(
    service: DecodeService, body: DecodeBody
) -> None:
    kv_bytes = (len(PROMPT) + 4) * ROW_BYTES
    async with aclosing(ask(service, body)) as events:
        if body is DIVIDED:
            slot = await slot_of(events)
            assert service.load_figures().kv_bytes > kv_bytes
            sending = asyncio.ensure_future(Sender(service, slot).send_all())
            of_type(await anext(events), TokensEvent)
            await sending
        else:
            of_type(await anext(events), LocalEvent)
        assert service.load_figures().kv_bytes == kv_bytes
    await idle(service)


@BOTH
async def test_this_host_goes_on_after_the_last_whole_chunk_if_the_prefill_host_fails(
    service: DecodeService, body: DecodeBody
) -> None:
    async with aclosing(ask(service, body)) as events:
        sender = Sender(service, await slot_of(events))
        sending = asyncio.ensure_future(fails_after(service, sender, 2))
        local, *rest = [event async for event in events]
        await sending
    stated, done = of_type(local, LocalEvent), of_type(rest[-1], DoneEvent)
    assert (stated.held_tokens, stated.prompt_tokens) == (2 * CHUNK, len(PROMPT))
    assert stated.reason.endswith(f": this host goes on after {2 * CHUNK} of {len(PROMPT) - 1} tokens")
    assert (done.resumed_at, done.computed_prompt_tokens) == (2 * CHUNK, len(PROMPT) - 2 * CHUNK)
    assert done.completion_tokens == 4 and done.timing.compute_s > 0 and done.timing.first_step_s == 0
    await idle(service)


@pytest.mark.parametrize(
    ("here_s", "elsewhere_s", "left", "other"),
    [
        (None, None, 0.5, False),
        (None, 9.0, 0.5, True),
        (10.0, 4.0, 0.5, True),
        (10.0, 4.0, 0.2, False),
        (None, 9.0, 0.0, False),  # all has come but the end
    ],
)
def test_another_prefill_host_is_wanted_if_it_is_quicker_with_its_layers_of_all_tokens(
    here_s: float | None, elsewhere_s: float | None, left: float, other: bool
) -> None:
    terms = SlotTerms(0, Spans(6, 8, ""), chunks=True, here_s=here_s, elsewhere_s=elsewhere_s)
    assert terms.other_head(left) == other


async def fails_after(service: DecodeService, sender: Sender, chunks: int) -> None:
    await sender.send(chunks)
    await came_whole(service, chunks * CHUNK)
    await sender.fail()


async def test_a_request_that_waits_for_its_turn_says_that_its_prefill_host_has_failed(service: DecodeService) -> None:
    async with aclosing(ask(service, DIVIDED)) as events:
        sender = Sender(service, await slot_of(events))
        with ExitStack() as places:
            for _ in range(service._admission.running_limit):
                await service._admission.take_turn(Share(), places)
            sending = asyncio.ensure_future(fails_after(service, sender, 2))
            async with asyncio.timeout(PATIENCE_S):
                assert of_type(await anext(events), LocalEvent).held_tokens == 2 * CHUNK
            await sending
        rest = [event async for event in events]
    assert of_type(rest[-1], DoneEvent).resumed_at == 2 * CHUNK
    await idle(service)


@BOTH
async def test_a_prefill_host_that_fails_before_a_chunk_is_whole_leaves_nothing_to_go_on_from(
    service: DecodeService, body: DecodeBody
) -> None:
    async with aclosing(ask(service, body)) as events:
        sender = Sender(service, await slot_of(events))
        await sender.send(0)
        (issued,) = service.tickets._issued.values()
        async with asyncio.timeout(PATIENCE_S):
            while issued.state != "claimed":
                await asyncio.sleep(0.005)
        await sender.fail()
        with pytest.raises(DisaggError):
            await anext(events)
    await idle(service)


@BOTH
async def test_another_prefill_host_goes_on_if_that_is_expected_to_be_quicker(
    service: DecodeService, body: DecodeBody
) -> None:
    """This host's speed is not measured."""
    async with aclosing(ask(service, replace(body, elsewhere_s=0.1))) as events:
        first = await slot_of(events)
        sender = Sender(service, first)
        failing = asyncio.ensure_future(fails_after(service, sender, 2))
        second = await slot_of(events)
        await failing
        assert (second.layers, second.held_tokens, second.kv_version) == (first.layers, 2 * CHUNK, KV_CHUNKS)
        assert second.ticket != first.ticket
        assert (first.kv_wire, second.kv_wire) == (None, "as-is")
        (issued,) = service.tickets._issued.values()
        assert present(issued.incoming.arriving.kv).sender == "", "what is wrong may be of either"
        other = Sender(service, second, "p-2")
        sending = asyncio.ensure_future(other.send_all())
        rest = [event async for event in events]
        await sending
    done = of_type(rest[-1], DoneEvent)
    assert (done.layers, done.resumed_at, done.computed_prompt_tokens) == (first.layers, None, 1)
    await idle(service)


async def came_to_engine(service: DecodeService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not service.engine.running:
            await asyncio.sleep(0.005)


async def test_no_other_prefill_host_goes_on_with_a_prompt_that_is_not_audited(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, info = EngineOptions("mlx", kv_audit=64), dataclasses.replace(service.engine.info, audits=True)
    monkeypatch.setattr(service, "audits", Audits(options, info))
    service.audits._of("p-1").passed = NEW
    async with aclosing(ask(service, replace(DIVIDED, elsewhere_s=0.01))) as events:
        sender = Sender(service, await slot_of(events))
        next_event = asyncio.ensure_future(anext(events))
        await sender.send(2)
        await came_whole(service, 2 * CHUNK)
        await came_to_engine(service)
        await sender.fail()
        assert of_type(await next_event, LocalEvent).held_tokens == 2 * CHUNK
    await idle(service)


async def test_what_two_prefill_hosts_have_sent_is_audited(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, info = EngineOptions("mlx", kv_audit=64), dataclasses.replace(service.engine.info, audits=True)
    monkeypatch.setattr(service, "audits", Audits(options, info))
    for name in ("p-1", "p-2", ""):
        service.audits._of(name).passed = NEW
    async with aclosing(ask(service, replace(DECODE, split=LAYERS, elsewhere_s=0.01))) as events:
        failing = asyncio.ensure_future(fails_after(service, Sender(service, await slot_of(events)), 2))
        other = Sender(service, await slot_of(events), "p-2")
        await failing
        sending = asyncio.ensure_future(other.send_all())
        [event async for event in events]
        await sending
    assert not service.audits.all_accepted, "the simulated engine audits nothing"
    assert service.audits._of("").since == 0, "an audit was ordered"
    await idle(service)


@pytest.mark.parametrize("next_s", [0.05])
@BOTH
async def test_this_host_goes_on_alone_if_no_other_prefill_host_begins(
    service: DecodeService, body: DecodeBody
) -> None:
    async with aclosing(ask(service, replace(body, elsewhere_s=0.01))) as events:
        failing = asyncio.ensure_future(fails_after(service, Sender(service, await slot_of(events)), 2))
        await slot_of(events)
        local, *rest = [event async for event in events]
        await failing
    assert "no other prefill host has gone on in time" in of_type(local, LocalEvent).reason
    assert of_type(local, LocalEvent).held_tokens == of_type(rest[-1], DoneEvent).resumed_at == 2 * CHUNK
    await idle(service)


@BOTH
async def test_this_host_goes_on_alone_if_the_other_prefill_host_fails_too(
    service: DecodeService, body: DecodeBody
) -> None:
    async with aclosing(ask(service, replace(body, elsewhere_s=0.01))) as events:
        failing = asyncio.ensure_future(fails_after(service, Sender(service, await slot_of(events)), 2))
        other = Sender(service, await slot_of(events))
        await failing
        await other.send(3)
        await came_whole(service, 3 * CHUNK)
        await other.fail()
        local, *rest = [event async for event in events]
    assert of_type(local, LocalEvent).held_tokens == of_type(rest[-1], DoneEvent).resumed_at == 3 * CHUNK
    await idle(service)


@BOTH
async def test_a_request_that_is_cancelled_ends_its_prefill_host_too(service: DecodeService, body: DecodeBody) -> None:
    async with aclosing(ask(service, body)) as events:
        sender = Sender(service, await slot_of(events))
        await sender.send(2)
        await came_whole(service, 2 * CHUNK)
    await idle(service)
    async with asyncio.timeout(PATIENCE_S):
        while sender.failed is None:
            await asyncio.sleep(0.005)
    await sender.fail()


async def test_a_failure_that_comes_after_the_request_has_ended_opens_no_other_slot(service: DecodeService) -> None:
    async with aclosing(ask(service, replace(DIVIDED, elsewhere_s=0.01))) as events:
        sender = Sender(service, await slot_of(events))
        await sender.send(2)
        await came_whole(service, 2 * CHUNK)
        (issued,) = service.tickets._issued.values()
    issued.on_outcome(PeerLost("the prefill host was killed"))
    assert service.tickets.outstanding == 0
    await idle(service)
    await sender.fail()


async def test_layers_that_the_prefill_host_has_not_are_an_error_and_open_no_slot(service: DecodeService) -> None:
    with pytest.raises(RequestError, match="split: 6 of 8 layers"):
        await anext(ask(service, replace(DIVIDED, prefill=replace(DIVIDES, layers=5))))
    await idle(service)


async def test_hosts_toml_may_say_how_prompts_are_divided(service: DecodeService) -> None:
    service._planner._split = 3
    for split, layers in (("auto", 3), (5, 5), ("off", None)):
        async with aclosing(ask(service, replace(DECODE, split=split, cache_salt=str(split)))) as events:
            assert (await slot_of(events)).layers == layers
    await idle(service)


async def test_a_slot_that_nobody_uses_is_closed_after_a_while(service: DecodeService, monkeypatch: Any) -> None:
    service._slots._waits = SlotWaits(unused_s=0.05)
    async with aclosing(ask(service, DIVIDED)) as events:
        await slot_of(events)
        with pytest.raises(PeerLost, match=r"no prefill host has sent KV within 0\.05 s"):
            await anext(events)
    await idle(service)
