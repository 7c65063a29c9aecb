"""A prefill host that computes a prompt's first layers: what it sends, what it refuses, and when it waits."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from disagg.api.events import ShippedEvent
from disagg.api.requests import GenerateBody, KVAddress, PrefillBody, ScoreBody
from disagg.config import EngineOptions, load
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import CapabilityMissing, DisaggError, LayoutMismatch, RequestError
from disagg.kv.arena import Arenas
from disagg.kv.arriving import CREDIT_CHUNKS, ArrivingKV
from disagg.kv.blocks import HiddenBlock
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.servers.host.request import Caller
from disagg.servers.prefill.service import PrefillService
from tests import tiny_models
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import make
from tests.engines.transformers.heads import computed
from tests.servers.host.test_service import answer
from tests.simulated import write_simulated
from tests.values import of_type, present

PATIENCE_S = 60.0
PROMPT = list(range(5, 405))
LAYERS = 3


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("qwen3", tmp_path_factory.mktemp("qwen3"))


@asynccontextmanager
async def serving(tmp_path: Path, model: Path, layers: str | None = None) -> AsyncIterator[PrefillService]:
    """The prefill host of a fleet, with chunks of 48 tokens of this model."""
    fleet = load(write_simulated(tmp_path))
    options = EngineOptions(
        "transformers", "float32", "cpu", chunk_tokens=48, threads=1, max_held_bytes=1 << 30, layers=layers
    )
    host = replace(fleet.hosts["m-prefill"], engine=options)
    service = PrefillService(fleet, host, lambda: TransformersPrefillEngine(model, 2048, options))
    await service.load()
    try:
        yield service
    finally:
        await service.close()


@dataclass(slots=True)
class DecodeHost:
    """The KV port of a decode host whose engine is the test."""

    service: PrefillService
    to: KVAddress
    tickets: Tickets
    outcomes: queue.Queue[KVOutcome]

    def expect(self, layers: int | None, start: int = 0) -> tuple[PrefillBody, ArrivingKV]:
        info = self.service.engine.info
        expected = Expected(
            "r",
            info.layout,
            info.fingerprint,
            token_hash(PROMPT),
            len(PROMPT) - 1,
            start,
            layers=layers,
            split=info.split,
            chunks=True,
        )
        arriving = ArrivingKV(
            expected.head, expected.tokens, start, arenas=self.tickets.arenas, layers=layers, hidden=expected.hidden
        )
        slot = self.tickets.issue(
            expected, self.outcomes.put, deadline=time.monotonic() + PATIENCE_S, arriving=arriving
        )
        body = PrefillBody(
            model="m",
            tokens=tuple(PROMPT),
            deliver=self.to,
            ticket=slot.ticket,
            start=start,
            layers=layers,
            kv_version=5,
        )
        return body, arriving


@contextmanager
def receiving(service: PrefillService) -> Iterator[DecodeHost]:
    host = service.fleet.hosts["m-decode"]
    to = KVAddress(host.kv_address, present(host.kv_port))
    tickets = Tickets(Arenas())
    with KVServer(to.host, to.port, tickets):
        yield DecodeHost(service, to, tickets, queue.Queue())


async def shipped(service: PrefillService, body: PrefillBody) -> ShippedEvent:
    async with asyncio.timeout(PATIENCE_S):
        (event,) = [event async for event in answer(service, "/prefill", body, Caller("r"))]
    return of_type(event, ShippedEvent)


async def taken(arriving: ArrivingKV, chunks: int | None = None) -> list[tuple[int, int, bytes]]:
    """The next chunks with their hidden states, taken as they come; all if no number is given."""
    got: list[tuple[int, int, bytes]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(got) != chunks:
            if (chunk := arriving.take()) is not None:
                hidden = b"" if chunk.hidden is None else present(chunk.hidden).data.tobytes()
                got.append((chunk.start, chunk.end, hidden[: (chunk.end - chunk.start) * arriving.hidden * 4]))
                arriving.taken(chunk)
            elif arriving.outcome is not None:
                break
            else:
                await asyncio.sleep(0.001)
    return got


@pytest.mark.parametrize("start", [0, 130])
async def test_the_first_layers_arrive_with_their_hidden_states_as_the_engine_computes_them(
    qwen3: Path, tmp_path: Path, start: int
) -> None:
    async with serving(tmp_path, qwen3) as service:
        with receiving(service) as decode:
            body, arriving = decode.expect(2, start)
            sending = asyncio.ensure_future(shipped(service, body))
            got = await taken(arriving)
            event = await sending
        engine = of_type(service.engine, TransformersPrefillEngine)
        want = computed(engine, PROMPT[:-1], 2, start=start, salt="another")
        assert [(first, end) for first, end, _ in got] == want.chunks
        assert b"".join(hidden for _, _, hidden in got) == b"".join(
            bytes(block.rows) for block in want.blocks if isinstance(block, HiddenBlock)
        )
        assert arriving.outcome == "complete" and arriving.whole == len(PROMPT) - 1
        assert (event.layers, event.computed_tokens, event.held_tokens) == (2, len(PROMPT) - 1, 0)
        info, rows = engine.info, len(PROMPT) - 1 - start
        assert (
            event.kv_bytes
            == info.split.head(info.layout, 2).nbytes(len(PROMPT) - 1, start) + rows * info.split.hidden * 4
        )


async def test_all_layers_in_chunks_come_without_hidden_states_and_wait_for_nobody(qwen3: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, qwen3) as service:
        with receiving(service) as decode:
            body, arriving = decode.expect(None)
            event = await shipped(service, body)
            got = await taken(arriving)
        assert [end for _, end, _ in got] == [*range(48, 399, 48), 399]
        assert (event.layers, event.starved_s) == (None, 0.0)
        assert event.kv_bytes == service.engine.info.layout.nbytes(399)


async def test_a_head_computes_no_further_than_its_decode_host_has_credit_for(qwen3: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, qwen3) as service:
        with receiving(service) as decode:
            body, arriving = decode.expect(2)
            began = time.monotonic()
            sending = asyncio.ensure_future(shipped(service, body))
            async with asyncio.timeout(PATIENCE_S):
                while arriving.whole < CREDIT_CHUNKS * 48 or service.busy:
                    await asyncio.sleep(0.001)
            assert service.scheduler.tokens == round((399 - CREDIT_CHUNKS * 48) * 2 / LAYERS)
            assert service.figures().queue_tokens == 0, "others need not wait for these"
            other, all_layers = decode.expect(None)
            await shipped(service, other)
            assert not sending.done(), "others go on meanwhile"
            await taken(arriving)
            event = await sending
        assert event.starved_s > 0 and event.queue_s >= 0
        stated_s = event.tokenise_s + event.queue_s + event.compute_s + event.starved_s + event.exposed_transfer_s
        assert stated_s <= time.monotonic() - began, "no part counts twice"
        assert service.figures().kv_bytes == 0 and all_layers.outcome == "complete"


async def test_a_head_that_goes_on_for_another_one_sends_in_its_form(qwen3: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, qwen3) as service:
        with receiving(service) as decode:
            body, arriving = decode.expect(2)
            with pytest.raises(LayoutMismatch, match="would send the KV as int8-g64"):
                await shipped(service, structs.replace(body, kv_wire="int8-g64"))
            arriving.release()


async def test_a_head_whose_decode_host_gives_the_request_up_stops_and_leaves_nothing(
    qwen3: Path, tmp_path: Path
) -> None:
    async with serving(tmp_path, qwen3) as service:
        with receiving(service) as decode:
            body, arriving = decode.expect(2)
            sending = asyncio.ensure_future(shipped(service, body))
            await taken(arriving, 2)
            arriving.release()
            with pytest.raises(DisaggError):
                await sending
            async with asyncio.timeout(PATIENCE_S):
                while (service.figures().kv_bytes, service.figures().queue_tokens, service.status().running) != (
                    0,
                    0,
                    0,
                ):
                    await asyncio.sleep(0.001)
            again, whole = decode.expect(2)
            after = asyncio.ensure_future(shipped(service, again))
            assert (await taken(whole))[-1][1] == 399
            await after


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 4}, "layers: the model has 3 layers: its first 4 cannot be computed"),
        ({"layers": 2, "kv_version": 4}, "layers: by version 4 of the KV protocol all are sent, not 2"),
    ],
)
async def test_orders_that_the_host_cannot_carry_out_are_refused_before_anything_is_computed(
    qwen3: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    async with serving(tmp_path, qwen3) as service:
        with receiving(service) as decode:
            body, _ = decode.expect(2)
            with pytest.raises(RequestError, match=message):
                await shipped(service, msgspec.structs.replace(body, **changes))
        assert service.status().counters.computed_prompt_tokens == 0


async def test_a_model_that_cannot_be_divided_is_handed_over_whole_only(tmp_path: Path) -> None:
    make(config("gemma3n"), model := tmp_path / "model")
    async with serving(tmp_path, model) as service:
        reason = "its layers pass on 4 hidden states per token"
        assert not service.load_figures().splits and service.status().split_refusal == reason
        with receiving(service) as decode:
            body, arriving = decode.expect(None)
            with pytest.raises(RequestError, match=reason):
                await shipped(service, msgspec.structs.replace(body, layers=2))
            await shipped(service, body)
            assert arriving.outcome == "complete"


async def test_an_engine_that_sends_by_itself_is_asked_for_no_chunks(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, qwen3) as service:
        assert (service.load_figures().splits, service.load_figures().kv_version) == (True, 5)
        monkeypatch.setattr(PrefillService, "kv_version", 4)
        assert (service.load_figures().splits, service.load_figures().kv_version) == (False, 4)
        assert service.status().split_refusal == "transformers sends the KV of all layers"
        with receiving(service) as decode:
            with pytest.raises(RequestError, match="layers: by version 4 of the KV protocol all are sent, not 2"):
                await shipped(service, decode.expect(2)[0])
            body, arriving = decode.expect(None)
            await shipped(service, body)
            assert (arriving.outcome, arriving.whole, arriving.take()) == ("complete", 399, None)


async def test_a_host_with_the_first_layers_only_computes_these_and_nothing_else(qwen3: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, qwen3, "0:2") as service:
        assert (service.load_figures().layers, service.load_figures().splits, service.status().layers) == (2, True, 2)
        await service.probe_engine()
        with receiving(service) as decode:
            body, arriving = decode.expect(2)
            sending = asyncio.ensure_future(shipped(service, body))
            assert (await taken(arriving))[-1][1] == 399
            await sending
            reason = "only the first 2 of the model's 3 layers are loaded here"
            for layers in (None, 3):
                with pytest.raises(RequestError, match=reason):
                    await shipped(service, msgspec.structs.replace(decode.expect(2)[0], layers=layers))
        for path, asked in (
            ("/generate", GenerateBody(model="m", prompt="x")),
            ("/score", ScoreBody(model="m", tokens=(5, 6, 7))),
        ):
            with pytest.raises(CapabilityMissing, match=reason):
                await anext(answer(service, path, asked, Caller("r")))
