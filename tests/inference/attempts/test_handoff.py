"""What follows if a prefill host fails in mid-prompt: the decode host goes on, and the client follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.api.events import Event, LocalEvent, ProgressEvent, ShippedEvent, SlotEvent
from disagg.api.names import KV_CHUNKS
from disagg.errors import DisaggError, HandoffError, ModelError, Overloaded, ServerUnavailable
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.client import AsyncClient
from disagg.inference.policy import DEFAULT_POLICY, RetryPolicy
from tests.inference.scripted import Body, Script, ScriptedHost, client_of, done, progress, slot, tokens, waiting, whole

Events = AsyncGenerator[Event | DisaggError, None]
PROMPT = tuple(range(40))
BROKEN = ModelError("the engine failed: out of memory")
SHIPPED = ShippedEvent(
    prompt_tokens=40,
    computed_tokens=39,
    kv_bytes=1,
    kv_wire="as-is",
    tokenise_s=0.0,
    queue_s=0.0,
    compute_s=0.0,
    hidden_transfer_s=0.0,
    exposed_transfer_s=0.0,
)


def chunked(body: Body, held: int = 0, layers: int | None = None) -> Event:
    return replace(slot(body), kv_version=KV_CHUNKS, held_tokens=held, layers=layers)


def alone(body: Body, held: int) -> LocalEvent:
    return LocalEvent(request_id="r", prompt_tokens=len(body["tokens"]), held_tokens=held, reason="the KV broke off")


class Pair:
    """A prefill host that fails once its decode host has what `sent` says of the prompt, and that decode host."""

    def __init__(self, *after: Event, states: str = "receiving KV", error: DisaggError = BROKEN) -> None:
        self._after, self._states, self._error = after, states, error
        self._failed, self._shipped = asyncio.Event(), asyncio.Event()

    async def broken(self, _: Body) -> Events:
        yield progress("computing the prompt", 1)
        self._failed.set()
        yield self._error

    async def works(self, _: Body) -> Events:
        self._shipped.set()
        yield SHIPPED

    async def decode(self, body: Body) -> Events:
        layers = 12 if any(getattr(event, "layers", None) for event in self._after) else None
        yield chunked(body, layers=layers)
        await self._failed.wait()
        yield progress(self._states)
        if not self._after:
            async for waits in waiting(self._states):
                yield waits
        for event in self._after:
            yield event
        if not isinstance(self._after[-1], LocalEvent):
            await self._shipped.wait()
        for token in range(body["sampling"]["max_tokens"]):
            yield tokens(token)
        resumed = self._after[-1].held_tokens if isinstance(self._after[-1], LocalEvent) else None
        yield replace(done(body, 1 if resumed is None else 40 - resumed), resumed_at=resumed, layers=layers)

    def hosts(self, **more: Mapping[str, Script]) -> dict[str, Mapping[str, Script]]:
        return {"p1": {"prefill": self.broken}, "d1": {"decode": self.decode, "generate": whole}, **more}


async def asked(
    pair: Pair, policy: RetryPolicy = DEFAULT_POLICY, **more: Mapping[str, Script]
) -> tuple[AsyncClient, dict[str, ScriptedHost], Any]:
    async with client_of(policy, **pair.hosts(**more)) as (client, hosts):
        for host in hosts.values():
            host.load = replace(host.load, kv_version=KV_CHUNKS, splits=True, prefill_tokens_s=1000.0)
        await client.connect("m")
        return client, hosts, await client.generate("m", tokens=PROMPT, max_tokens=2, timeout=20.0)


def orders(hosts: dict[str, ScriptedHost], name: str) -> list[Body]:
    return [body for path, body in hosts[name].asked if path == "/prefill"]


@pytest.fixture
def body() -> Body:
    return {"tokens": list(PROMPT)}


async def test_the_decode_host_goes_on_after_what_has_come_and_the_answer_says_so(body: Body) -> None:
    client, hosts, answer = await asked(Pair(alone(body, 16)))
    assert [token.id for token in answer.tokens] == [0, 1]
    assert (answer.metrics.method, answer.metrics.resumed_at) == ("disaggregated", 16)
    assert answer.metrics.ttft_parts.total == pytest.approx(answer.metrics.ttft)
    assert answer.warnings == (
        f"p1 failed after 16 of 40 prompt tokens ({BROKEN.message}): the prompt goes on from there",
    )
    assert len(orders(hosts, "p1")) == 1 and len(hosts["d1"].asked) == 1
    assert client.view.of("p1").breaker.failures == 1 and client.view.of("d1").breaker.failures == 0
    assert client.view.of("p1").outstanding == client.view.of("d1").outstanding == 0


async def test_another_prefill_host_is_asked_for_the_rest_of_the_same_layers(body: Body) -> None:
    pair = Pair(replace(chunked(body, held=16, layers=12), kv_wire="int8-g64"))
    _, hosts, answer = await asked(pair, p2={"prefill": pair.works})
    (first,), (second,) = orders(hosts, "p1"), orders(hosts, "p2")
    assert (first["layers"], first.get("start", 0), first["kv_version"]) == (12, 0, KV_CHUNKS)
    assert (second["layers"], second["start"], second["kv_version"]) == (12, 16, KV_CHUNKS)
    assert "kv_wire" not in first and second["kv_wire"] == "int8-g64", "as the first one has begun"
    assert [token.id for token in answer.tokens] == [0, 1] and "p1 failed after 16 of 40" in answer.warnings[0]
    assert (answer.metrics.prefill_server, answer.metrics.resumed_at) == ("p2", None)
    assert answer.metrics.ttft_parts.failed_attempts > 0
    assert answer.metrics.ttft_parts.total == pytest.approx(answer.metrics.ttft)


async def test_if_the_other_prefill_host_fails_too_the_decode_host_is_waited_for(body: Body) -> None:
    """It states for a moment that it waits for KV, and then goes on alone."""
    failed = [asyncio.Event(), asyncio.Event()]

    def breaks(event: asyncio.Event) -> Script:
        async def prefill(_: Body) -> Events:
            yield progress("computing the prompt", 1)
            event.set()
            yield BROKEN

        return prefill

    async def decode(body: Body) -> Events:
        yield chunked(body, layers=12)
        await failed[0].wait()
        yield chunked(body, held=16, layers=12)
        await failed[1].wait()
        await asyncio.sleep(0.05)
        yield progress("waiting for KV")
        yield alone(body, 24)
        yield tokens(0)
        yield replace(done(body), completion_tokens=1, resumed_at=24, layers=12)

    hosts: dict[str, Mapping[str, Script]] = {f"p{n}": {"prefill": breaks(failed[n - 1])} for n in (1, 2)}
    async with client_of(DEFAULT_POLICY, **hosts, d1={"decode": decode, "generate": whole}) as (client, scripts):
        for host in scripts.values():
            host.load = replace(host.load, kv_version=KV_CHUNKS, splits=True)
        await client.connect("m")
        answer = await client.generate("m", tokens=PROMPT, max_tokens=1, timeout=20.0)
    assert (answer.metrics.method, answer.metrics.resumed_at) == ("disaggregated", 24)
    assert [warning.partition(" (")[0] for warning in answer.warnings] == [
        "p1 failed after 16 of 40 prompt tokens",
        "p2 failed after 24 of 40 prompt tokens",
    ]


async def test_if_the_decode_host_breaks_off_after_a_second_prefill_host_was_asked_another_answers(
    body: Body,
) -> None:
    pair = Pair(chunked(body, held=16, layers=12))

    async def breaks_off(body: Body) -> Events:
        async for event in pair.decode(body):
            if not isinstance(event, SlotEvent | ProgressEvent):
                return
            yield event

    async def answers(body: Body) -> Events:
        yield alone(body, 0)
        for event in (tokens(0), tokens(1), done(body)):
            yield event

    hosts = {**pair.hosts(p2={"prefill": pair.works}), "d1": {"decode": breaks_off}, "d2": {"decode": answers}}
    async with client_of(DEFAULT_POLICY, **hosts) as (client, scripts):
        for host in scripts.values():
            host.load = replace(host.load, kv_version=KV_CHUNKS, splits=True)
        await client.connect("m")
        answer = await client.generate("m", tokens=PROMPT, max_tokens=2, timeout=20.0)
        assert all(client.view.of(name).outstanding == 0 for name in hosts)
    assert [token.id for token in answer.tokens] == [0, 1] and len(orders(scripts, "p2")) >= 1
    assert answer.metrics.decode_server == "d2"


@pytest.mark.parametrize("can", [{"splits": False}, {"layers": 11}, {"kv_version": 4}])
async def test_a_prefill_host_that_has_not_these_layers_is_not_asked_for_them(body: Body, can: dict[str, Any]) -> None:
    """The decode host goes on alone when none has come."""
    pair = Pair(chunked(body, held=16, layers=12), alone(body, 16))
    async with client_of(DEFAULT_POLICY, **pair.hosts(p2={"prefill": pair.works})) as (client, hosts):
        for name, host in hosts.items():
            more = can if name == "p2" else {}
            host.load = replace(host.load, **{"kv_version": KV_CHUNKS, "splits": True, **more})
        await client.connect("m")
        answer = await client.generate("m", tokens=PROMPT, max_tokens=2, timeout=20.0)
    assert not orders(hosts, "p2") and answer.metrics.resumed_at == 16


@pytest.mark.usefixtures("virtual_time")
async def test_a_failure_before_any_chunk_has_come_whole_is_followed_by_another_attempt() -> None:
    """The decode host states that it still waits: it has nothing to go on from."""
    pair = Pair(states="waiting for KV")
    _, _, answer = await asked(pair, RetryPolicy(prefill_attempts=1))
    assert answer.metrics.method == "fallback" and answer.metrics.ttft < DEFAULT_POLICY.timeouts.silence
    assert answer.warnings[-1].startswith(f"{FALLBACK_WARNING}: {BROKEN.message}")


async def test_a_prefill_host_that_refuses_has_sent_nothing_and_is_not_waited_for() -> None:
    async def full(_: Body) -> Events:
        yield Overloaded("the server's queue is full", "try again")

    async def waits(body: Body) -> Events:
        yield chunked(body)
        await asyncio.Event().wait()

    hosts: dict[str, Mapping[str, Script]] = {"p1": {"prefill": full}, "d1": {"decode": waits, "generate": whole}}
    async with client_of(DEFAULT_POLICY, **hosts) as (client, scripts):
        scripts["d1"].load = scripts["p1"].load = replace(scripts["d1"].load, kv_version=KV_CHUNKS)
        await client.connect("m")
        with pytest.raises(Overloaded, match="every host was busy"):
            await client.generate("m", tokens=PROMPT, max_tokens=2, timeout=0.5)
    assert len(orders(scripts, "p1")) >= 1


class LatePair(Pair):
    """The decode host says a second later that it goes on."""

    async def decode(self, body: Body) -> Events:
        async for event in super().decode(body):
            if isinstance(event, LocalEvent):
                await asyncio.sleep(1.0)
            yield event


@pytest.mark.usefixtures("virtual_time")
async def test_a_decode_host_without_memory_for_one_more_chunk_goes_on_after_those_that_have_come(body: Body) -> None:
    pair = LatePair(alone(body, 16), error=Overloaded("no memory for 4096 bytes of KV"))
    _, hosts, answer = await asked(pair)
    assert len(orders(hosts, "p1")) == 1 and len(hosts["d1"].asked) == 1
    assert "no memory for 4096 bytes of KV): the prompt goes on from there" in answer.warnings[0]


async def test_without_fallback_a_prompt_that_the_decode_host_goes_on_with_alone_is_an_error(body: Body) -> None:
    async with client_of(DEFAULT_POLICY, **Pair(alone(body, 16)).hosts()) as (client, _):
        with pytest.raises(HandoffError, match="out of memory"):
            await client.generate("m", tokens=PROMPT, max_tokens=2, on_kv_failure="fail", timeout=20.0)


@pytest.mark.parametrize(
    ("split", "stated", "note"),
    [
        (12, {}, "the prompt was not divided: the decode host divides none"),
        (
            12,
            {"reason": "split = 12: its layers share KV"},
            "the prompt was not divided: split = 12: its layers share KV",
        ),
        (99, {"reason": "split = 99"}, ""),
        (12, {"reason": "split = 12", "layers": 12}, ""),
        ("auto", {"reason": "40 tokens left to compute"}, ""),
    ],
)
async def test_a_prompt_that_is_not_divided_as_it_was_asked_for_says_why(
    split: Any, stated: dict[str, Any], note: str
) -> None:
    async def decode(body: Body) -> Events:
        yield replace(chunked(body), **stated)
        yield tokens(0)
        yield replace(done(body), completion_tokens=1)

    async def works(_: Body) -> Events:
        yield SHIPPED

    hosts: dict[str, Mapping[str, Script]] = {"p1": {"prefill": works}, "d1": {"decode": decode}}
    async with client_of(DEFAULT_POLICY, **hosts) as (client, scripted):
        answer = await client.generate("m", tokens=PROMPT, max_tokens=1, split=split, timeout=20.0)
    assert answer.warnings == ((note,) if note else ())
    (_, asked_for), *_ = scripted["d1"].asked
    assert "split" not in asked_for, "a host of an earlier version would refuse it"


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (lambda body: [chunked(body), chunked(body, 8), chunked(body, 16)], "it opened slot 3"),
        (lambda body: [slot(body), alone(body, 8)], "it opened a second slot"),
        (lambda body: [chunked(body), alone(body, 8), alone(body, 8)], "it opened a second slot"),
        (lambda body: [chunked(body), tokens(0), alone(body, 8)], "it opened a second slot"),
        (lambda body: [chunked(body), replace(alone(body, 8), prompt_tokens=39)], "its slots are of different prompts"),
        (lambda body: [chunked(body), alone(body, 41)], "it states that it holds 41 of 40 prompt tokens"),
    ],
)
async def test_slots_that_do_not_follow_each_other_are_no_answer(events: Any, reason: str) -> None:
    async def decode(body: Body) -> Events:
        for event in events(body):
            yield event

    async def computing(_: Body) -> Events:
        yield progress("computing the prompt", 1)
        await asyncio.Event().wait()

    hosts: dict[str, Mapping[str, Script]] = {"p1": {"prefill": computing}, "d1": {"decode": decode}}
    async with client_of(DEFAULT_POLICY, **hosts) as (client, _):
        with pytest.raises(ServerUnavailable, match=reason):
            await client.generate("m", tokens=PROMPT, max_tokens=2, timeout=20.0)


async def test_a_division_that_a_request_asks_for_waits_until_the_hosts_have_stated_what_they_can(body: Body) -> None:
    pair = Pair(alone(body, 16))
    async with client_of(DEFAULT_POLICY, **pair.hosts()) as (client, hosts):
        for host in hosts.values():
            host.load = replace(host.load, kv_version=KV_CHUNKS, splits=True)
        await client.generate("m", tokens=PROMPT, max_tokens=2, split=12, timeout=20.0)
    (_, asked_for), *_ = hosts["d1"].asked
    assert asked_for["split"] == 12
    assert asked_for["prefill"] == {"wait_s": 0.0, "splits": True, "kv_version": KV_CHUNKS}
