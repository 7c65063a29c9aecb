"""Requests whose host's process ends: which are suspects, and how they go on. Hosts are scripts of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.api.events import Event
from disagg.api.requests import GenerateBody
from disagg.api.status import Load
from disagg.errors import DisaggError, RequestEndedHosts
from disagg.inference.attempts.suspects import Asked
from disagg.inference.client import AsyncClient
from disagg.inference.options import request_body
from disagg.inference.policy import DEFAULT_POLICY, RetryPolicy
from disagg.inference.types import Completion
from disagg.strikes import marks
from tests.inference.attempts.test_handoff import PROMPT, SHIPPED
from tests.inference.scripted import (
    Body,
    Script,
    ScriptedHost,
    client_of,
    described_host,
    done,
    progress,
    slot,
    tokens,
    whole,
)

POISON = 666
LUCKY = 7  # the seed of a poisonous request that is computed all the same
ANSWER = [0, 1, 2, 3]


@dataclass
class Fleet:
    """Decode hosts that answer alone. A request whose first token is POISON breaks off. before: the phase that the host
    states first. after: the tokens that it sends. ends: its process has ended, and is started again. gate: honest
    requests are answered when it is set. at_once: requests that run, the most at a time."""

    before: str = ""
    after: int = 0
    ends: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    at_once: int = 0
    client: AsyncClient = field(init=False)
    hosts: dict[str, ScriptedHost] = field(init=False)

    async def answer(self, host: str, body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        try:
            if body["tokens"][0] == POISON and body.get("sampling", {}).get("seed") != LUCKY:
                if self.before:
                    yield progress(self.before)
                given = len(body.get("answer_tokens", ()))
                for token in range(given, given + self.after):
                    yield tokens(token)
                if self.ends:
                    self.restart(host)
                return
            await self.gate.wait()
            async for event in whole(body):
                yield event
        finally:
            self.running -= 1

    def restart(self, host: str) -> None:
        """Another start of the server answers from now on."""
        load = self.hosts[host].load
        self.hosts[host].load = Load("ok", boot_id=f"{load.boot_id}'", strikes=load.strikes)

    @property
    def asked(self) -> list[str]:
        """The hosts that got a poisonous request, in order."""
        return [name for name, host in self.hosts.items() for _, body in host.asked if body["tokens"][0] == POISON]

    async def generate(self, first: int, **options: Any) -> Completion:
        return await self.client.generate("m", tokens=[first, 1, 2], max_tokens=4, alone="decode", **options)


@asynccontextmanager
async def fleet(hosts: int, policy: RetryPolicy = DEFAULT_POLICY, **options: Any) -> AsyncIterator[Fleet]:
    made = Fleet(**options)
    made.gate.set()
    scripts: dict[str, dict[str, Script]] = {
        name: {"generate": partial(made.answer, name), "count": partial(made.answer, name)} for name in names(hosts)
    }
    async with client_of(policy, **scripts) as (made.client, made.hosts):
        await made.client.connect()
        yield made


def names(hosts: int) -> list[str]:
    return [f"d{number}" for number in range(1, hosts + 1)]


async def test_a_request_that_ends_two_hosts_gets_no_third_and_is_refused_if_it_is_sent_again() -> None:
    async with fleet(4) as made:
        with pytest.raises(RequestEndedHosts, match="d1 and d2 ended while computing this request: it is tried on no"):
            await made.generate(POISON)
        with pytest.raises(RequestEndedHosts, match="refused for 300 s"):
            await made.generate(POISON, seed=7)
        assert made.asked == ["d1", "d2"]
        assert [token.id for token in (await made.generate(5)).tokens] == ANSWER


async def test_a_prompt_that_ends_two_hosts_as_it_is_counted_gets_no_third_and_no_chat_with_it_is_sent() -> None:
    """A tokenizer may crash, too, and POST /count goes to prefill hosts as well."""
    async with fleet(4) as made:
        with pytest.raises(RequestEndedHosts, match="d1 and d2 ended while computing this request: it is tried on no"):
            await made.client.count_tokens("m", tokens=[POISON, 1, 2])
        assert [body.get("standing", "") for host in made.hosts.values() for _, body in host.asked] == ["", "suspect"]
        with pytest.raises(RequestEndedHosts, match="refused for 300 s"):
            await made.client.count_tokens("m", tokens=[POISON, 1, 2])
        with pytest.raises(RequestEndedHosts, match="refused for 300 s"):
            await made.generate(POISON)
        assert made.asked == ["d1", "d2"]


async def test_a_prompt_whose_count_is_cut_off_is_counted_by_the_next_host() -> None:
    async with fleet(4, ends=False) as made:
        with pytest.raises(DisaggError) as raised:
            await made.client.count_tokens("m", tokens=[POISON, 1, 2])
        assert not isinstance(raised.value, RequestEndedHosts)
        assert set(made.asked) == {"d1", "d2", "d3", "d4"}


@pytest.mark.parametrize(
    "options",
    [{"ends": False}, {"before": "queued"}, {"after": 1}],
    ids=["a cut link", "it only waited in the queue", "each host sends a token"],
)
async def test_a_request_that_cannot_have_ended_its_host_goes_on_as_ever(options: dict[str, Any]) -> None:
    async with fleet(3, **options) as made:
        with pytest.raises(DisaggError) as raised:
            await made.generate(POISON, timeout=0.8)
        assert not isinstance(raised.value, RequestEndedHosts)
        assert {"d1", "d2", "d3"} == set(made.asked)


async def test_suspects_go_on_one_at_a_time_and_honest_ones_are_answered() -> None:
    """Four honest requests are at hosts that end."""
    async with fleet(3) as made:
        made.gate.clear()
        honest = [asyncio.ensure_future(made.generate(number, timeout=60.0)) for number in range(4)]
        async with asyncio.timeout(30):
            while made.running < 4:
                await asyncio.sleep(0)
        for name, host in made.hosts.items():
            made.restart(name)
            host.end_connections()
        while made.running:
            await asyncio.sleep(0)
        made.at_once = 0
        made.gate.set()
        answers = await asyncio.gather(*honest)
        assert [[token.id for token in answer.tokens] for answer in answers] == [ANSWER] * 4
        assert made.at_once == 1


async def test_strikes_that_hosts_state_refuse_a_request_before_it_is_sent() -> None:
    body = request_body("m", None, {"tokens": [5, 1, 2], "max_tokens": 4})
    assert isinstance(body, GenerateBody)
    mark = marks(body, "t").request
    async with fleet(2) as made:
        for name, strikes in (("d1", 1), ("d2", 1)):
            made.hosts[name].load = Load("ok", boot_id=name, strikes={mark: strikes})
        await made.client.connect()
        with pytest.raises(RequestEndedHosts, match="hosts ended while computing this request"):
            await made.generate(5)
        assert not any(host.asked for host in made.hosts.values())
        assert [token.id for token in (await made.generate(6)).tokens] == ANSWER


async def test_hosts_learn_whether_a_request_is_a_suspect_or_innocent_though_it_has_strikes() -> None:
    body = request_body("m", None, {"tokens": [5, 1, 2], "max_tokens": 4})
    assert isinstance(body, GenerateBody)
    mark = marks(body, "t").request
    async with fleet(2) as made:
        with pytest.raises(RequestEndedHosts):
            await made.generate(POISON)
        assert [asked.get("standing", "") for host in made.hosts.values() for _, asked in host.asked] == ["", "suspect"]
        made.hosts["d1"].load = Load("ok", boot_id="d1", strikes={mark: 2})
        made.hosts["d2"].load = Load("ok", boot_id="d2", acquitted=(mark,))
        await made.client.connect()
        await made.generate(5)
        honest = [asked for host in made.hosts.values() for _, asked in host.asked if asked["tokens"][0] == 5]
        assert [asked["standing"] for asked in honest] == ["innocent"]


async def test_how_many_hosts_a_request_may_end_is_the_policys() -> None:
    async with fleet(4, RetryPolicy(host_losses=3)) as made:
        with pytest.raises(RequestEndedHosts, match="d1 and d2 and d3"):
            await made.generate(POISON)


async def test_a_request_that_hosts_have_computed_goes_on_until_they_have_ended_with_it_more_often_and_then_twice() -> (
    None
):
    async with fleet(6) as made:
        for _ in range(2):
            await made.generate(POISON, seed=LUCKY)
        with pytest.raises(RequestEndedHosts, match="it is tried on no other host"):
            await made.generate(POISON)
        standings = [body.get("standing", "") for host in made.hosts.values() for _, body in host.asked]
        assert sorted(standings) == ["", "", "", "innocent", "innocent", "suspect"]


async def test_the_end_of_a_host_counts_once_for_all_requests_alike_that_were_there() -> None:
    """Two were computed before. Eight of the same are at both hosts when these end."""
    async with fleet(2) as made:
        for _ in range(2):
            await made.generate(5)
        made.gate.clear()
        honest = [asyncio.ensure_future(made.generate(5, timeout=60.0)) for _ in range(8)]
        async with asyncio.timeout(30):
            while made.running < 8:
                await asyncio.sleep(0)
        for name, host in made.hosts.items():
            made.restart(name)
            host.end_connections()
        made.gate.set()
        await asyncio.gather(*honest)
        standings = [body.get("standing", "") for host in made.hosts.values() for _, body in host.asked]
        assert sorted(standings) == [*[""] * 10, *["innocent"] * 8]


async def test_a_refused_request_is_refused_no_longer_once_a_host_has_computed_one_like_it() -> None:
    async with fleet(4) as made:
        made.gate.clear()
        late = asyncio.ensure_future(made.generate(POISON, seed=LUCKY, timeout=60.0))
        async with asyncio.timeout(30):
            while not made.running:
                await asyncio.sleep(0)
        with pytest.raises(RequestEndedHosts, match="it is tried on no other host"):
            await made.generate(POISON)
        with pytest.raises(RequestEndedHosts, match="refused for 300 s"):
            await made.generate(POISON, seed=LUCKY)
        made.gate.set()
        await late
        assert [token.id for token in (await made.generate(POISON, seed=LUCKY)).tokens] == ANSWER


async def test_strikes_that_hosts_state_do_not_refuse_what_they_have_computed_for_this_client() -> None:
    body = request_body("m", None, {"tokens": [5, 1, 2], "max_tokens": 4})
    assert isinstance(body, GenerateBody)
    mark = marks(body, "t").request
    async with fleet(2) as made:
        await made.generate(5)
        for name, strikes in (("d1", 1), ("d2", 1)):
            made.hosts[name].load = Load("ok", boot_id=name, strikes={mark: strikes})
        await made.client.connect()
        assert [token.id for token in (await made.generate(5)).tokens] == ANSWER


@pytest.mark.parametrize(("before", "ended"), [("by hand-offs", False), ("by the decode host alone", True)])
async def test_prefill_hosts_that_end_with_a_prompt_are_excused_by_those_that_have_computed_it(
    before: str, ended: bool
) -> None:
    """Not by decode hosts. The prompt is computed twice, then it ends that of every prefill host."""
    harmless, shipped = True, asyncio.Event()

    async def prefill(name: str, body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        yield progress("computing the prompt", 1)
        if harmless:
            shipped.set()
            yield SHIPPED
        else:
            hosts[name].load = replace(hosts[name].load, boot_id=f"{hosts[name].load.boot_id}'")

    async def decode(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        yield slot(body)
        await shipped.wait()
        for token in range(2):
            yield tokens(token)
        yield done(body)

    scripts = {name: {"prefill": partial(prefill, name)} for name in ("p1", "p2")}
    async with client_of(DEFAULT_POLICY, **scripts, d1={"decode": decode, "generate": whole}) as (client, hosts):
        for host in hosts.values():
            host.load = replace(host.load, prefill_tokens_s=1000.0)
        await client.connect("m")
        options: dict[str, Any] = {"tokens": PROMPT, "max_tokens": 2, "timeout": 20.0}
        for _ in range(2):
            await client.generate("m", **options, alone="decode" if ended else None)
        harmless = False
        shipped.clear()
        options["cache_salt"] = "of which no host holds KV"
        if ended:
            with pytest.raises(RequestEndedHosts, match="ended while computing this request: it is tried on no"):
                await client.generate("m", **options)
        else:
            assert (await client.generate("m", **options)).metrics.method == "fallback"
        assert sum(len(hosts[name].asked) for name in scripts) == 2 + (0 if ended else 2)


def test_two_ends_of_a_host_whose_starts_are_not_known_are_not_taken_for_one() -> None:
    host = described_host("d1", 9)
    assert Asked(host, "b", False).start == Asked(host, "b", True).start != Asked(host, "c", False).start
    assert Asked(host, "", False).start != Asked(host, "", False).start
