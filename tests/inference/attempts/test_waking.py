"""Requests for models that are not loaded: what wakes, what is waited for, and that none is lost. The clock jumps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.models_trace import optimum, trace
from disagg.api.events import ShippedEvent
from disagg.api.status import CountAnswer
from disagg.errors import DeadlineExceeded, DisaggError, ModelError, Overloaded, ServerUnavailable
from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion, Stage
from tests.inference.scripted import Body, Script, done, progress, slot, tokens, whole
from tests.inference.scripted_keeper import ScriptedKeeper, kept_fleet

pytestmark = pytest.mark.usefixtures("virtual_time")
Keepers = dict[str, ScriptedKeeper]
LOAD_S = 5.0
ALONE: Mapping[str, Script] = {"generate": whole}
PROMPT = tuple(range(40))


async def handed_off(body: Body) -> AsyncGenerator[Any, None]:
    yield slot(body)
    yield progress("receiving KV")
    await asyncio.sleep(0.2)
    for token in range(body["sampling"]["max_tokens"]):
        yield tokens(token)
    yield done(body)


async def ships(body: Body) -> AsyncGenerator[Any, None]:
    yield progress("computing the prompt")
    yield ShippedEvent(
        prompt_tokens=len(body["tokens"]),
        computed_tokens=len(body["tokens"]) - 1,
        kv_bytes=1,
        kv_wire="as-is",
        tokenise_s=0.0,
        queue_s=0.0,
        compute_s=0.0,
        hidden_transfer_s=0.0,
        exposed_transfer_s=0.0,
    )


DECODES: Mapping[str, Script] = {"decode": handed_off, "generate": whole}
PREFILLS: Mapping[str, Script] = {"prefill": ships, "generate": whole}


@asynccontextmanager
async def client_of(
    *, load_s: float = LOAD_S, room: int = 1, **keepers: Mapping[str, Mapping[str, Script]]
) -> AsyncIterator[tuple[AsyncClient, Keepers]]:
    async with (
        kept_fleet(load_s=load_s, room=room, **keepers) as (fleet, running),
        AsyncClient(fleet, token="t", start=0) as client,
    ):
        yield client, running


async def answer(client: AsyncClient, model: str = "m", **options: Any) -> Completion:
    completion = await client.generate(model, tokens=PROMPT, max_tokens=2, **options)
    assert [token.id for token in completion.tokens] == [0, 1]
    return completion


def loads(keepers: Keepers) -> dict[str, int]:
    return {f"{name}/{model}": one.loads for name, keeper in keepers.items() for model, one in keeper.models.items()}


async def test_both_hosts_of_a_hand_off_load_at_the_same_time() -> None:
    stages = list[Stage]()
    async with client_of(d1={"m": DECODES}, p1={"m": PREFILLS}) as (client, keepers):
        async with client.stream("m", tokens=PROMPT, max_tokens=2, watch=stages.append, split=0) as stream:
            notes = [chunk.note async for chunk in stream if chunk.note]
        metrics = stream.completion.metrics
    assert loads(keepers) == {"d1/m": 1, "p1/m": 1} and metrics.method == "disaggregated"
    assert metrics.ttft_parts.loading == pytest.approx(LOAD_S, abs=0.5) and metrics.ttft < LOAD_S + 1
    assert metrics.ttft_parts.failed_attempts == 0
    assert notes == ["loading 5 s: m on d1 and p1"]
    assert [stage.phase for stage in stages][:3] == ["loading", "queue", "prefill"]


async def test_requests_that_come_together_share_one_load() -> None:
    async with client_of(d1={"m": ALONE}, d2={"m": ALONE}) as (client, keepers):
        await asyncio.gather(*(answer(client) for _ in range(8)))
    assert sorted(loads(keepers).values()) == [0, 1]


async def test_two_models_go_where_each_has_room() -> None:
    models = {"m": ALONE, "n": ALONE}
    async with client_of(d1=models, d2=models) as (client, keepers):
        for _ in range(3):
            await asyncio.gather(*(answer(client, model) for model in "mn"))
            await asyncio.sleep(30)  # the client asks no host any more
    assert sorted(loads(keepers).values()) == [0, 0, 1, 1]


async def test_models_that_take_turns_are_loaded_in_turn_and_no_request_is_lost() -> None:
    models = {"m": ALONE, "n": ALONE}
    async with client_of(d1=models) as (client, keepers):
        for model in "mnmn":
            await asyncio.gather(*(answer(client, model) for _ in range(3)))
    assert loads(keepers) == {"d1/m": 2, "d1/n": 2}


async def test_a_model_that_was_unloaded_unseen_is_loaded_again_and_no_host_is_blamed() -> None:
    async with client_of(d1={"m": ALONE}, d2={"m": ALONE}) as (client, keepers):
        await answer(client)
        (first,) = (name for name, count in loads(keepers).items() if count)
        await asyncio.sleep(30)
        await keepers[first[:2]].models["m"].stop()
        await answer(client)
        assert client.view.of(first).breaker.failures == 0
    assert sorted(loads(keepers).values()) == [0, 2]


async def test_a_request_that_meets_a_model_on_its_way_out_waits_for_it_at_the_keeper() -> None:
    stopping = list[asyncio.Future[None]]()

    async def drains(_: Body) -> AsyncGenerator[Any, None]:
        keeper.models["m"].scripts["/generate"] = whole
        stopping.append(asyncio.ensure_future(keeper.models["m"].stop()))
        yield Overloaded("d1 is draining")

    async with client_of(d1={"m": {"generate": drains}}) as (client, keepers):
        keeper = keepers["d1"]
        completion = await answer(client)
    assert loads(keepers) == {"d1/m": 2} and completion.metrics.ttft < 3 * LOAD_S


async def test_a_process_that_ends_under_a_request_is_no_unloaded_model() -> None:
    """It may have ended because of the request: after two the request is refused."""
    stopping = list[asyncio.Future[None]]()

    def ends(name: str) -> Script:
        async def script(_: Body) -> AsyncGenerator[Any, None]:
            stopping.append(asyncio.ensure_future(keepers[name].models["m"].stop(evicted=False)))
            await asyncio.sleep(1)
            yield progress("generating")

        return script

    async with client_of(d1={"m": {"generate": ends("d1")}}, d2={"m": {"generate": ends("d2")}}) as (client, keepers):
        with pytest.raises(DisaggError, match="ended while computing this request"):
            await answer(client)
    assert loads(keepers) == {"d1/m": 1, "d2/m": 1}


async def test_a_host_that_cannot_load_the_model_leaves_it_to_another() -> None:
    async with client_of(d1={"m": ALONE}, d2={"m": ALONE}) as (client, keepers):
        ranked = client.explain("m", tokens=PROMPT)
        assert not ranked.decode
        await client.connect("m")
        first = client.explain("m", tokens=PROMPT).decode[0].host
        keepers[first.keeper].fails["m"] = ModelError("d1: out of memory")
        await answer(client)
    assert loads(keepers)[first.name] == 0 and sum(loads(keepers).values()) == 1


async def test_a_load_that_does_not_end_is_left_for_another_host() -> None:
    async with client_of(d1={"m": ALONE}, d2={"m": ALONE}) as (client, keepers):
        await client.connect("m")
        first = client.explain("m", tokens=PROMPT).decode[0].host
        keepers[first.keeper].hangs.add("m")
        completion = await answer(client, timeout=45.0)
    assert 15 < completion.metrics.ttft < 15 + 2 * LOAD_S
    assert any("has not loaded m in 15 s, and expected 5" in note for note in completion.warnings)


async def test_a_load_that_does_not_end_is_waited_for_if_no_other_host_has_the_model() -> None:
    async with client_of(d1={"m": ALONE}) as (client, keepers):
        keepers["d1"].hangs.add("m")
        waits = asyncio.ensure_future(answer(client, timeout=90.0))
        await asyncio.sleep(60)
        keepers["d1"].hangs.clear()
        assert (await waits).metrics.ttft_parts.failed_attempts == 0


async def test_a_request_that_waits_for_memory_says_so() -> None:
    async with client_of(load_s=86400.0, d1={"m": ALONE}) as (client, keepers):
        keepers["d1"].hangs.add("m")
        async with client.stream("m", tokens=PROMPT, timeout=30.0) as stream:
            assert (await anext(aiter(stream))).note == "waiting for memory: m on d1"


async def test_a_model_that_no_host_can_load_is_an_error_at_once_with_the_reason() -> None:
    async with client_of(d1={"m": ALONE}) as (client, keepers):
        keepers["d1"].fails["m"] = ModelError("its weights are damaged")
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match="d1/m: failed: its weights are damaged"):
            await answer(client)
        assert time.monotonic() - began < 1


async def test_a_request_without_the_time_for_a_load_says_so() -> None:
    async with client_of(d1={"m": ALONE}) as (client, _):
        with pytest.raises(DeadlineExceeded, match="m was still being loaded after 2 s"):
            await answer(client, timeout=2.0)


async def test_whoever_leaves_gives_the_place_at_the_keeper_up() -> None:
    async with client_of(d1={"m": ALONE}) as (client, keepers):
        one = keepers["d1"].models["m"]
        waits = [asyncio.ensure_future(answer(client)) for _ in range(2)]
        await asyncio.sleep(1)
        waits[0].cancel()
        await asyncio.sleep(1)
        assert one.wanted == 1
        waits[1].cancel()
        await asyncio.wait(waits)
        await asyncio.sleep(2)
        assert one.wanted == 0 and client.view.of("d1/m").woken == 0


@pytest.mark.parametrize(("prompt", "method"), [(40, "decode-alone"), (4000, "disaggregated")])
async def test_while_only_the_decode_host_is_ready_it_answers_alone_if_that_is_sooner(prompt: int, method: str) -> None:
    """The prompt takes 4 s more there by what is assumed of a host that has measured nothing: 0.12 or 12 s."""
    async with client_of(d1={"m": DECODES}, p1={"m": PREFILLS}) as (client, keepers):
        await keepers["d1"].models["m"].start()
        completion = await client.generate("m", tokens=range(prompt), max_tokens=2, split="off")
    assert completion.metrics.method == method
    assert (completion.metrics.ttft < 1) == (method == "decode-alone")


@pytest.mark.parametrize(("answer_tokens", "method"), [(2, "prefill-alone"), (400, "disaggregated")])
async def test_while_only_the_prefill_host_is_ready_it_answers_alone_if_that_is_sooner(
    answer_tokens: int, method: str
) -> None:
    async with client_of(d1={"m": DECODES}, p1={"m": PREFILLS}) as (client, keepers):
        await keepers["p1"].models["m"].start()
        completion = await client.generate("m", tokens=PROMPT, max_tokens=answer_tokens, split="off")
    assert completion.metrics.method == method


async def test_a_hand_off_that_is_asked_for_waits_for_both_hosts() -> None:
    async with client_of(d1={"m": DECODES}, p1={"m": PREFILLS}) as (client, keepers):
        await keepers["d1"].models["m"].start()
        completion = await answer(client, local_prefill=False)
    assert completion.metrics.method == "disaggregated" and loads(keepers)["p1/m"] == 1


async def test_a_prefill_host_that_cannot_load_the_model_leaves_the_prompt_to_the_decode_host() -> None:
    async with client_of(d1={"m": DECODES}, p1={"m": PREFILLS}) as (client, keepers):
        await client.connect("m")
        keepers["p1"].fails["m"] = ModelError("p1: out of memory")
        completion = await answer(client)
    assert completion.metrics.method == "fallback" and "out of memory" in completion.warnings[-1]


async def test_a_frozen_keeper_leaves_its_models_that_are_ready_in_use() -> None:
    async with client_of(d1={"m": ALONE}) as (client, keepers):
        await answer(client)
        keepers["d1"].load_s = 1e9
        with client.watching():
            await asyncio.sleep(60)
            await answer(client)
    assert loads(keepers) == {"d1/m": 1}


async def test_counting_tokens_wakes_a_model() -> None:
    async def counted(_: Body) -> AsyncGenerator[Any, None]:
        yield CountAnswer(7)

    async with client_of(d1={"m": {"count": counted}}) as (client, keepers):
        assert await client.count_tokens("m", tokens=PROMPT) == 7
    assert loads(keepers) == {"d1/m": 1}


@pytest.mark.slow
@pytest.mark.parametrize("room", [2, 1])
async def test_a_trace_loads_at_most_half_more_models_than_the_optimum(room: int) -> None:
    models = dict.fromkeys("abcd", ALONE)
    asked = trace("abcd", 200, 20.0, seed=3)
    async with client_of(room=room, d1=models, d2=models) as (client, keepers):
        await in_turn(client, asked)
    assert sum(loads(keepers).values()) <= 1.5 * optimum(asked, 2 * room)


@pytest.mark.slow
async def test_nobody_starves_if_every_request_is_for_another_model() -> None:
    models = dict.fromkeys("abcd", ALONE)
    async with client_of(d1=models, d2=models) as (client, _):
        seconds = await in_turn(client, trace("abcd", 60, 1.0, seed=3))
    assert max(seconds) < 12 * LOAD_S


async def in_turn(client: AsyncClient, models: Sequence[str], concurrency: int = 8) -> list[float]:
    """One request for each of these models, so many at a time; the seconds of each."""
    turns, seconds = iter(models), list[float]()

    async def ask() -> None:
        for model in turns:
            began = time.monotonic()
            await answer(client, model)
            seconds.append(time.monotonic() - began)

    await asyncio.gather(*(ask() for _ in range(concurrency)))
    return seconds
