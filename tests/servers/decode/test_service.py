"""disagg/servers/decode/service.py without HTTP or a model: slots, KV memory, held KV, prompts computed here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.api.events import DoneEvent, Event, LocalEvent, RefutedEvent, SlotEvent, TokensEvent
from disagg.api.requests import DecodeBody, GenerateBody, PrefillOffer, PromptBody
from disagg.api.sampling import Sampling
from disagg.config import KVAudit, load
from disagg.engines.base import DecodeRequest, DecodeTiming, EngineInfo, Listener, Token
from disagg.engines.base.audit import AuditBounds, AuditFinding, Deviation
from disagg.engines.model.prefix_cache import PinnedPrefix
from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.errors import DeadlineExceeded, KVMemoryExceeded, KVRefuted, ModelError, PeerLost
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.audits import NEW
from disagg.servers.decode.handoff import SlotWaits
from disagg.servers.decode.service import DecodeService
from disagg.servers.host.health import FAILURES_IN_A_ROW
from disagg.servers.host.request import Caller
from tests.simulated import ROW_BYTES, write_simulated
from tests.values import of_type, present

PATIENCE_S = 60.0
SLOW = PrefillOffer(wait_s=60.0, tokens_s=1.0)
PROMPT = tuple(range(40))
DECODE = DecodeBody(model="m", tokens=PROMPT, sampling=Sampling(max_tokens=4))
MAX_BATCH, QUEUE = 2, 2


@dataclass(frozen=True)
class Setting:
    """Of a service. audits: its engine states that it audits. kv_audit: of hosts.toml."""

    unused_s: float = SlotWaits().unused_s
    audits: bool = False
    kv_audit: KVAudit = "auto"


class AuditingEngine(SimulatedDecodeEngine):
    """States that it audits, and makes no audit."""

    @property
    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info, audits=True)


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.fixture
async def service(tmp_path: Path, setting: Setting) -> AsyncIterator[DecodeService]:
    """Two requests may run and two wait, three may have a slot, and there is KV memory for 200 tokens."""
    path = write_simulated(tmp_path)
    limits = f"max_batch = {MAX_BATCH}, max_kv_bytes = {200 * ROW_BYTES}"
    text = path.read_text().replace('roles = ["decode"]', f'roles = ["decode"]\nqueue_size = {QUEUE}')
    head, decode = text.split("[hosts.m-decode]")
    path.write_text(f"{head}[hosts.m-decode]{decode.replace('chunk_tokens = 512', f'chunk_tokens = 512, {limits}')}")
    fleet = load(path)
    host, model = fleet.hosts["m-decode"], fleet.models["m"]
    options = dataclasses.replace(host.engine, kv_audit=setting.kv_audit)
    engine = AuditingEngine if setting.audits else SimulatedDecodeEngine
    make = partial(engine, model.sources.get(options.name, ""), model.context, options, present(host.hardware))
    made = DecodeService(fleet, dataclasses.replace(host, engine=options), make, SlotWaits(unused_s=setting.unused_s))
    await made.load()
    yield made
    await made.close()


class Held(PinnedPrefix[Any, Any]):
    """Held KV of the simulated engine, which has none of its own."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.released = False

    def release(self) -> None:
        self.released = True


def ask(service: DecodeService, body: PromptBody) -> AsyncGenerator[Event, None]:
    path = "/decode" if isinstance(body, DecodeBody) else "/generate"
    (endpoint,) = (one for one in service.endpoints() if one.path == path)
    return endpoint.events(body, Caller("the-request"))


async def answered(service: DecodeService, body: PromptBody) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in ask(service, body)]


async def idle(service: DecodeService) -> None:
    """Until nothing is held any more; fails if that takes too long."""
    async with asyncio.timeout(PATIENCE_S):
        while (load := service.load_figures()).queue or load.running or load.kv_bytes:
            await asyncio.sleep(0.01)


async def test_a_rest_that_is_computed_faster_here_needs_no_slot(service: DecodeService) -> None:
    first, *_, last = await answered(service, replace(DECODE, tokens=PROMPT[:30], prefill=SLOW))
    local, done = of_type(first, LocalEvent), of_type(last, DoneEvent)
    assert (local.prompt_tokens, local.held_tokens) == (30, 0) and "29 tokens" in local.reason
    assert (done.local, done.computed_prompt_tokens) == (local.reason, 30)
    await idle(service)


async def test_speeds_are_measured_and_decide_where_later_prompts_are_computed(service: DecodeService) -> None:
    assert (service.load_figures().prefill_tokens_s, service.load_figures().decode_tokens_s) == (None, None)
    await answered(service, GenerateBody(model="m", tokens=PROMPT, sampling=Sampling(max_tokens=4)))
    load = service.load_figures()
    assert present(load.prefill_tokens_s) > 0 and present(load.decode_tokens_s) > 0
    first, *_ = await answered(service, replace(DECODE, prefill=SLOW, cache_salt="nothing is held"))
    assert "39 tokens left to compute: " in of_type(first, LocalEvent).reason


async def test_without_an_offer_of_a_prefill_host_the_kv_is_waited_for(service: DecodeService) -> None:
    async with aclosing(ask(service, replace(DECODE, tokens=PROMPT[:3]))) as events:
        assert isinstance(await anext(events), SlotEvent)
    await idle(service)


async def test_an_answer_that_was_given_whole_gets_neither_slot_nor_tokens(service: DecodeService) -> None:
    (done,) = await answered(service, replace(DECODE, answer_tokens=(7, 8, 9, 10)))
    assert of_type(done, DoneEvent).finish_reason == "length"


async def test_prompt_and_answer_are_reserved_before_the_slot_is_given(service: DecodeService) -> None:
    async with aclosing(ask(service, replace(DECODE, answer_tokens=(1, 2)))) as events:
        slot = of_type(await anext(events), SlotEvent)
        load = service.load_figures()
        assert (load.kv_bytes, load.kv_limit) == (44 * ROW_BYTES, 200 * ROW_BYTES)
        assert slot.prompt_tokens == 40
    await idle(service)


async def test_a_request_that_can_never_fit_is_refused_as_such(service: DecodeService) -> None:
    with pytest.raises(KVMemoryExceeded):
        await answered(service, replace(DECODE, sampling=Sampling(max_tokens=161)))
    await idle(service)


async def test_a_request_waits_for_kv_memory_until_its_deadline_and_no_longer(service: DecodeService) -> None:
    async with aclosing(ask(service, replace(DECODE, sampling=Sampling(max_tokens=150)))) as large:
        await anext(large)
        with pytest.raises(DeadlineExceeded, match="there was no room for its KV"):
            await answered(service, replace(DECODE, deadline_s=0.3))
    await idle(service)


async def test_a_request_goes_on_when_kv_memory_is_released(service: DecodeService) -> None:
    body = GenerateBody(model="m", tokens=PROMPT, sampling=Sampling(max_tokens=20))
    async with aclosing(ask(service, replace(DECODE, sampling=Sampling(max_tokens=150)))) as large:
        await anext(large)
        waiting = asyncio.ensure_future(answered(service, body))
        async with asyncio.timeout(PATIENCE_S):
            while service.load_figures().queue < 2:
                await asyncio.sleep(0.01)
    assert isinstance((await waiting)[-1], DoneEvent)


async def test_a_cancelled_request_keeps_its_kv_memory_until_the_engine_has_dropped_it(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirm, cancel = list[Callable[[], None]](), service.engine.cancel

    def cancel_later(request_id: str, dropped: Callable[[], None]) -> None:
        cancel(request_id)
        confirm.append(dropped)

    monkeypatch.setattr(service.engine, "cancel", cancel_later)
    body = GenerateBody(model="m", tokens=PROMPT, sampling=Sampling(max_tokens=150, ignore_eos=True))
    async with aclosing(ask(service, body)) as large:
        await anext(large)
    assert service.load_figures().running == 0 and service.load_figures().kv_bytes == 190 * ROW_BYTES
    with pytest.raises(DeadlineExceeded, match="there was no room for its KV"):
        await answered(service, replace(DECODE, deadline_s=0.3))
    confirm[0]()
    assert service.load_figures().kv_bytes == 0
    assert isinstance((await answered(service, replace(body, cache_salt="the next")))[-1], DoneEvent)


async def test_slots_leave_places_for_requests_that_need_none(service: DecodeService) -> None:
    waiting = [ask(service, DECODE) for _ in range(3)]
    for events in waiting:
        assert isinstance(await anext(events), SlotEvent)
    with pytest.raises(DeadlineExceeded, match="no free slot"):
        await answered(service, replace(DECODE, deadline_s=0.3))
    body = GenerateBody(model="m", tokens=PROMPT, sampling=Sampling(max_tokens=4))
    assert isinstance((await answered(service, body))[-1], DoneEvent)
    for events in waiting:
        await events.aclose()
    await idle(service)


@pytest.mark.parametrize("setting", [Setting(unused_s=0.05)])
async def test_a_slot_that_nobody_uses_is_closed_long_before_the_deadline(service: DecodeService) -> None:
    with pytest.raises(PeerLost, match=r"no prefill host has sent KV within 0\.05 s"):
        await answered(service, DECODE)
    await idle(service)
    assert service.tickets.outstanding == 0


@pytest.mark.parametrize("setting", [Setting(unused_s=0.0)])
async def test_a_slot_stays_open_while_its_caller_has_a_lease_as_its_prompt_may_be_in_a_long_queue(
    service: DecodeService,
) -> None:
    with pytest.raises(DeadlineExceeded, match="the KV had not arrived"):
        await answered(service, replace(DECODE, lease_s=60.0, deadline_s=0.5))
    await idle(service)
    assert service.tickets.outstanding == 0


async def test_held_kv_is_used_for_what_is_computed_here_and_released_with_the_first_token(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, asked = Held(25), list[tuple[Sequence[int], str]]()

    def find(tokens: Sequence[int], salt: str) -> Held:
        asked.append((tokens, salt))
        return held

    monkeypatch.setattr(service.engine, "find_held", find)
    events = await answered(service, replace(DECODE, prefill=SLOW, cache_salt="tenant"))
    local, done = of_type(events[0], LocalEvent), of_type(events[-1], DoneEvent)
    assert (local.held_tokens, done.held_tokens) == (25, 25) and "14 tokens" in local.reason
    assert held.released and asked == [(list(PROMPT), "tenant")]


async def test_a_slot_names_the_tokens_that_are_held_and_awaits_only_the_others(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(25)
    monkeypatch.setattr(service.engine, "find_held", lambda tokens, salt: held)
    async with aclosing(ask(service, DECODE)) as events:
        slot = of_type(await anext(events), SlotEvent)
        expected = next(iter(service.tickets._issued.values())).expected
    assert (slot.held_tokens, expected.start, expected.tokens) == (25, 25, 39)
    await idle(service)
    assert held.released


async def test_held_kv_is_let_go_while_its_request_waits_for_room(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Held]()

    def find(tokens: Sequence[int], salt: str) -> Held:
        made.append(Held(25))
        return made[-1]

    monkeypatch.setattr(service.engine, "find_held", find)
    async with aclosing(ask(service, replace(DECODE, sampling=Sampling(max_tokens=150)))) as large:
        await anext(large)
        waiting = asyncio.ensure_future(answered(service, replace(DECODE, prefill=SLOW)))
        async with asyncio.timeout(PATIENCE_S):
            while len(made) < 2:
                await asyncio.sleep(0.01)
        assert (made[0].released, made[1].released) == (False, True)
    assert of_type((await waiting)[-1], DoneEvent).held_tokens == 25
    assert [one.released for one in made] == [True, True, True]


class NotANumber:
    """A listener that finds the probabilities of all tokens but the first `right` to be none. audit: what an audit of
    the KV has found."""

    def __init__(self, listener: Listener, right: int = 0, audit: AuditFinding | None = None) -> None:
        self._listener, self._right, self._audit = listener, right, audit

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        timing.audit = self._audit
        for token in tokens:
            wrong = self._right <= 0
            self._right -= 1
            self._listener.on_tokens([dataclasses.replace(token, logprob=nan) if wrong else token], timing)

    def on_error(self, error: Exception) -> None:
        self._listener.on_error(error)


def find_wrong(service: DecodeService, monkeypatch: pytest.MonkeyPatch, error: KVRefuted | None) -> None:
    """Received KV is refuted with this error by the engine, or gives no number as its first probability."""
    submit = service.engine.submit

    def judge(request: DecodeRequest, listener: Listener) -> None:
        if request.kv is None:
            submit(request, listener)
        elif error is None:
            submit(request, NotANumber(listener))
        else:
            listener.on_error(error)

    monkeypatch.setattr(service.engine, "submit", judge)


async def handed_over(service: DecodeService, body: DecodeBody = DECODE) -> list[Event]:
    """The events after the slot, to which the KV came."""
    layout = service.engine.info.layout
    async with asyncio.timeout(PATIENCE_S), aclosing(ask(service, body)) as events:
        slot = of_type(await anext(events), SlotEvent)
        (issued,) = service.tickets._issued.values()
        kv = ReceivedKV(layout, 39, None, slot.held_tokens, sender="p-1")
        issued.incoming.arriving.kv = kv
        service.tickets.settle(issued, kv)
        return [event async for event in events]


@pytest.mark.parametrize("error", [KVRefuted("rows of layer 3 differ by 1.4"), None], ids=["by an audit", "by a NaN"])
async def test_a_prompt_whose_kv_is_wrong_is_computed_here_and_its_sender_is_blamed(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch, error: KVRefuted | None
) -> None:
    find_wrong(service, monkeypatch, error)
    for count in range(1, FAILURES_IN_A_ROW + 1):
        body = replace(DECODE, cache_salt=f"nothing is held for {count}")
        refuted, *_, last = await handed_over(service, body)
        event, done = of_type(refuted, RefutedEvent), of_type(last, DoneEvent)
        assert (event.sender, event.blamed) == ("p-1", True)
        assert "the KV from p-1 is wrong: " in event.message and "disagg verify m" in event.hint
        assert (done.refuted, done.computed_prompt_tokens, done.kv_wire) == (event.message, 40, None)
        assert done.completion_tokens == 4 and done.timing.refuted_s > 0
        assert service.load_figures().senders["p-1"].verdict == "refuted"
        assert service.status().counters.refuted == service.status().senders["p-1"].refuted == count
    assert service.load_figures().status == "ok", "the engine of this host works"
    await idle(service)


async def test_wrong_kv_counts_against_the_host_that_was_asked_for_it_whatever_its_header_states(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that lies would else be audited, and blamed, as a good one."""
    find_wrong(service, monkeypatch, KVRefuted("rows of layer 3 differ by 1.4"))
    first, *_ = await handed_over(service, replace(DECODE, sender="p-2"))
    refuted = of_type(first, RefutedEvent)
    assert refuted.sender == "p-2" and "the KV from p-2 is wrong" in refuted.message
    assert list(service.load_figures().senders) == ["p-2"]


async def test_an_answer_whose_kv_gave_no_number_begins_its_form_anew(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has chosen tokens by then, and its form has taken them."""
    find_wrong(service, monkeypatch, None)
    form = {"type": "object", "properties": {"a": {"enum": [1234]}}, "required": ["a"], "additionalProperties": False}
    body = replace(DECODE, sampling=Sampling(max_tokens=60), json_schema=form)
    refuted, *tokens, last = await handed_over(service, body)
    assert of_type(refuted, RefutedEvent) and of_type(last, DoneEvent).finish_reason == "stop"
    assert json.loads("".join(of_type(event, TokensEvent).text for event in tokens)) == {"a": 1234}


async def test_kv_that_is_no_number_with_kv_that_was_computed_here_is_this_engines_fault(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = service.engine.submit
    monkeypatch.setattr(service.engine, "submit", lambda request, listener: submit(request, NotANumber(listener)))
    with pytest.raises(ModelError, match="NaN"):
        await handed_over(service)
    await idle(service)


@pytest.mark.parametrize(("setting", "audited"), [(Setting(audits=True), True), (Setting(audits=False), False)])
async def test_a_later_nan_is_the_senders_fault_unless_an_audit_has_accepted_its_kv(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch, audited: bool
) -> None:
    finding = AuditFinding(8, (Deviation("rows", 1e-4, 2),)) if audited else None
    submit = service.engine.submit
    monkeypatch.setattr(service.engine, "submit", lambda work, to: submit(work, NotANumber(to, 2, finding)))
    for count in range(1, FAILURES_IN_A_ROW + 1):
        with pytest.raises(ModelError if audited else KVRefuted, match="NaN" if audited else "the KV from p-1 is wro"):
            await handed_over(service, replace(DECODE, cache_salt=f"nothing is held for {count}"))
    assert (service.load_figures().status == "error") is audited
    stated = {name: one.verdict for name, one in service.load_figures().senders.items()}
    assert stated == {"p-1": "accepted" if audited else "refuted"}


@pytest.mark.parametrize("setting", [Setting(audits=True)])
async def test_an_answer_states_by_how_much_its_kv_differed(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = AuditFinding(8, (Deviation("rows", 1.1, 2),))
    submit = service.engine.submit
    monkeypatch.setattr(service.engine, "submit", lambda work, to: submit(work, NotANumber(to, 99, finding)))
    done = of_type((await handed_over(service))[-1], DoneEvent)
    assert done.audited_tokens == 8 and done.deviation == pytest.approx(1.0), "the weights are not stated"
    assert service.status().senders["p-1"].deviation == done.deviation


@pytest.mark.parametrize("setting", [Setting(audits=True)])
async def test_kv_whose_audit_could_not_be_made_is_used_and_not_counted_as_accepted(service: DecodeService) -> None:
    """The engine of this host simulates, and audits nothing."""
    done = of_type((await handed_over(service))[-1], DoneEvent)
    assert (done.computed_prompt_tokens, done.deviation) == (1, None)
    assert not service.audits.all_accepted and service.status().senders == {}


@pytest.mark.parametrize("setting", [Setting(audits=True, kv_audit=4)])
@pytest.mark.parametrize(("asked", "audited"), [(False, False), (True, True)])
async def test_a_caller_can_ask_for_an_audit(
    service: DecodeService, monkeypatch: pytest.MonkeyPatch, asked: bool, audited: bool
) -> None:
    orders, submit = list[AuditBounds | None](), service.engine.submit

    def note(work: DecodeRequest, listener: Listener) -> None:
        orders.append(work.audit)
        submit(work, listener)

    monkeypatch.setattr(service.engine, "submit", note)
    order = present(service.audits.order(ReceivedKV(service.engine.info.layout, 39, None, 0, sender="p-1")))
    for _ in range(NEW):
        service.audits.passed("p-1", order, AuditFinding(8, (Deviation("rows", 1e-4, 2),)), 0.0)
    await handed_over(service, replace(DECODE, audit=asked))
    assert [one is not None for one in orders] == [audited]


@pytest.mark.parametrize("setting", [Setting(audits=True)])
@pytest.mark.parametrize(
    ("all_accepted", "of_received", "blamed", "used"),
    [
        (True, False, True, True),
        (True, True, True, True),
        (False, False, False, False),
        (False, True, True, False),
    ],
)
async def test_held_kv_that_was_perhaps_not_audited_is_forgotten_and_may_be_to_blame(
    service: DecodeService,
    monkeypatch: pytest.MonkeyPatch,
    all_accepted: bool,
    of_received: bool,
    blamed: bool,
    used: bool,
) -> None:
    error, held, forgotten = KVRefuted("rows differ"), Held(25), list[tuple[Sequence[int], str]]()
    error.of_received = of_received
    find_wrong(service, monkeypatch, error)
    monkeypatch.setattr(service.engine, "find_held", lambda tokens, salt: held)
    monkeypatch.setattr(service.engine, "forget_held", lambda tokens, salt: forgotten.append((tokens, salt)))
    service.audits.all_accepted = all_accepted

    refuted, *_, last = await handed_over(service, replace(DECODE, cache_salt="tenant"))

    assert of_type(refuted, RefutedEvent).blamed is blamed and held.released
    assert forgotten == ([] if used else [(list(PROMPT), "tenant")])
    assert of_type(last, DoneEvent).computed_prompt_tokens == (15 if used else 40)
    assert {name: one.verdict for name, one in service.load_figures().senders.items()} == (
        {"p-1": "refuted"} if blamed else {}
    )
    await idle(service)
