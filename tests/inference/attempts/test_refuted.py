"""KV that a decode host refutes: the answer comes from it all the same, and the host to blame is left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.api.events import Event, RefutedEvent, ShippedEvent, Timing
from disagg.api.status import Load, SenderAudits, Verdict
from disagg.errors import DisaggError, HandoffError, KVRefuted
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.hosts.breaker import FAILURES_IF_IT_ANSWERS
from disagg.inference.policy import DEFAULT_POLICY
from tests.inference.scripted import Body, Script, client_of, done, slot, tokens, whole

Events = AsyncGenerator[Event | DisaggError, None]
WRONG = RefutedEvent(sender="p1", blamed=True, message="the KV from p1 is wrong: rows of layer 3 differ by 1.4")
MORE: dict[str, Any] = {"max_tokens": 2, "timeout": 20.0}


class Links:
    """Scripts of prefill and decode hosts of one test. A decode host knows whose KV has come."""

    def __init__(self) -> None:
        self._sent = asyncio.Queue[str]()

    async def sent(self) -> str:
        """Who has sent KV."""
        return await self._sent.get()

    def sending(self, name: str) -> Script:
        """The prefill host of this name."""

        async def prefill(body: Body) -> Events:
            self._sent.put_nowait(name)
            yield ShippedEvent(
                prompt_tokens=len(body["tokens"]),
                computed_tokens=len(body["tokens"]) - 1,
                kv_bytes=1,
                kv_wire="as-is",
                tokenise_s=0.0,
                queue_s=0.0,
                compute_s=0.5,
                hidden_transfer_s=0.0,
                exposed_transfer_s=0.0,
            )

        return prefill

    def refuting(self, *senders: str, blamed: bool = True, audited_tokens: int = 2) -> Script:
        """A decode host that refutes the KV of these prefill hosts and accepts that of others."""

        async def decode(body: Body) -> Events:
            yield slot(body)
            sender, end = await self._sent.get(), replace(done(body), audited_tokens=audited_tokens)
            if sender in senders:
                yield replace(WRONG, sender=sender, blamed=blamed)
                timing = Timing(refuted_s=0.25, compute_s=0.1)
                end = replace(end, refuted=WRONG.message, timing=timing, computed_prompt_tokens=len(body["tokens"]))
            for token in range(body["sampling"]["max_tokens"]):
                yield tokens(token)
            yield end

        return decode

    def hosts(self, *senders: str, **options: Any) -> dict[str, Mapping[str, Script]]:
        """p1 and d1, which refutes these."""
        return {
            "p1": {"prefill": self.sending("p1")},
            "d1": {"decode": self.refuting(*senders, **options), "generate": whole},
        }


async def test_the_answer_says_that_its_kv_was_wrong_and_its_prompt_computed_by_the_decode_host() -> None:
    async with client_of(DEFAULT_POLICY, **Links().hosts("p1")) as (client, scripts):
        notes = []
        async with client.stream("m", tokens=[1, 2], **MORE) as stream:
            async for chunk in stream:
                notes.append(chunk.note)
        answer = stream.completion
    assert notes == [note := f"{FALLBACK_WARNING}: {WRONG.message}", "", ""] and answer.warnings == (note,)
    metrics = answer.metrics
    assert (metrics.method, metrics.prefill_server, metrics.decode_server) == ("fallback", None, "d1")
    assert metrics.decode_computed_tokens == 2 and metrics.kv_bytes == 0
    assert metrics.ttft_parts.failed_attempts >= 0.25 and metrics.ttft_parts.prefill == 0.1
    assert metrics.ttft_parts.total == pytest.approx(metrics.ttft)
    assert len(scripts["d1"].asked) == len(scripts["p1"].asked) == 1, "no other attempt"


async def test_a_sender_is_out_after_three_and_then_gets_one_request_to_find_out() -> None:
    async with client_of(DEFAULT_POLICY, **Links().hosts("p1")) as (client, scripts):
        view = client.view
        for count in range(1, FAILURES_IF_IT_ANSWERS + 1):
            assert not view.of("p1").obstacle(0.0), "KV that was sent and refuted does not count as a success"
            await client.generate("m", tokens=[1, 2], **MORE)
            assert (view.of("p1").breaker.failures, view.of("d1").breaker.failures) == (count, 0)
        assert view.of("p1").breaker.ejections == 1 and view.of("p1").outstanding == 0
        alone = await client.generate("m", tokens=[1, 2], **MORE)
        assert alone.metrics.method == "fallback" and len(scripts["p1"].asked) == FAILURES_IF_IT_ANSWERS


@pytest.mark.parametrize(("audited_tokens", "failures"), [(0, 2), (2, 0)])
async def test_only_kv_that_passes_an_audit_is_the_way_back(audited_tokens: int, failures: int) -> None:
    async with client_of(DEFAULT_POLICY, **Links().hosts(audited_tokens=audited_tokens)) as (client, _):
        view = client.view
        for _ in range(2):
            view.judged("p1", view.of("p1").breaker.failed(KVRefuted(""), 0.0, 1.0, 0.0))
        answer = await client.generate("m", tokens=[1, 2], **MORE)
        assert answer.metrics.audited_tokens == audited_tokens and answer.metrics.method == "disaggregated"
        assert view.of("p1").breaker.failures == failures


async def test_without_a_fallback_another_prefill_host_is_asked_and_then_the_request_fails() -> None:
    links = Links()
    hosts = {**links.hosts("p1", "p2"), "p2": {"prefill": links.sending("p2")}}
    async with client_of(DEFAULT_POLICY, **hosts) as (client, scripts):
        with pytest.raises(HandoffError, match="the KV hand-off failed: the KV from p1 is wrong"):
            await client.generate("m", tokens=[1, 2], on_kv_failure="fail", **MORE)
        assert [len(scripts[name].asked) for name in ("p1", "p2", "d1")] == [1, 1, 2]


async def test_nobody_is_blamed_if_held_kv_may_be_wrong() -> None:
    async with client_of(DEFAULT_POLICY, **Links().hosts("p1", blamed=False)) as (client, _):
        for _ in range(2 * FAILURES_IF_IT_ANSWERS):
            answer = await client.generate("m", tokens=[1, 2], **MORE)
            assert answer.metrics.method == "fallback"
        assert client.view.of("p1").breaker.failures == 0


def stating(name: str, **senders: Verdict) -> Load:
    audited = {sender: SenderAudits(verdict=verdict) for sender, verdict in senders.items()}
    return Load("ok", boot_id=name, senders=audited)


@pytest.mark.parametrize(
    ("d1", "d2", "to_blame"),
    [
        ({"p1": "refuted", "p2": "refuted"}, {"p1": "accepted", "p2": "accepted"}, "d1"),
        ({"p2": "refuted"}, {"p1": "accepted", "p2": "accepted"}, "d1"),
        ({"p1": "refuted", "p2": "refuted"}, {"p1": "accepted"}, "p1"),
        ({"p1": "refuted", "p2": "refuted"}, {"p1": "refuted", "p2": "accepted"}, "p1"),
        ({"p1": "refuted", "p2": "accepted"}, {"p1": "accepted", "p2": "accepted"}, "p1"),
        ({}, {}, "p1"),
    ],
)
async def test_a_decode_host_that_refutes_two_senders_whose_kv_others_accept_is_to_blame(
    d1: dict[str, Verdict], d2: dict[str, Verdict], to_blame: str
) -> None:
    links = Links()
    hosts = {
        **links.hosts("p1", "p2"),
        "p2": {"prefill": links.sending("p2")},
        "d2": {"decode": links.refuting()},
    }
    async with client_of(DEFAULT_POLICY, **hosts) as (client, scripts):
        view = client.view
        view.answered("d1", stating("d1", **d1))
        view.answered("d2", stating("d2", **d2))
        answer = await client.generate("m", tokens=[1, 2], **MORE)
        failed = [name for name in scripts if view.of(name).breaker.failures]
    assert failed == [to_blame]
    assert answer.metrics.decode_server == ("d2" if to_blame == "d1" else "d1")
    assert answer.metrics.method == ("disaggregated" if to_blame == "d1" else "fallback")
    assert len(scripts["d2"].asked) == (1 if to_blame == "d1" else 0)


async def test_kv_that_is_found_wrong_in_mid_answer_counts_against_its_sender_and_another_goes_on() -> None:
    links = Links()

    async def finds_out_late(body: Body) -> Events:
        yield slot(body)
        sender = await links.sent()
        given = body.get("answer_tokens", ())
        yield tokens(len(given))
        if sender == "p1":
            yield KVRefuted(WRONG.message)
        else:
            yield done(body)

    hosts: dict[str, Mapping[str, Script]] = {name: {"prefill": links.sending(name)} for name in ("p1", "p2")}
    async with client_of(DEFAULT_POLICY, **hosts, d1={"decode": finds_out_late}) as (client, _):
        view = client.view
        answer = await client.generate("m", tokens=[1, 2], **MORE)
        failures = {name: view.of(name).breaker.failures for name in ("p1", "p2", "d1")}
    assert [token.id for token in answer.tokens] == [0, 1] and answer.metrics.prefill_server == "p2"
    assert failures == {"p1": 1, "p2": 0, "d1": 0} and view.of("p1").breaker.refuted


async def test_the_kv_of_a_sender_that_was_refuted_is_audited_wherever_it_goes() -> None:
    async with client_of(DEFAULT_POLICY, **Links().hosts()) as (client, scripts):
        view = client.view
        await client.generate("m", tokens=[1, 2], **MORE)
        view.judged("p1", view.of("p1").breaker.failed(KVRefuted(""), 0.0, 1.0, 0.0))
        for _ in range(2):
            await client.generate("m", tokens=[1, 2], **MORE)
    assert [body.get("audit", False) for path, body in scripts["d1"].asked if path == "/decode"] == [False, True, False]
