"""vLLM on two ranks, each on its own node, which share the heads or the layers: its tokens, what each rank sends, and
what is left when one is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from disagg.engines.model.reference import Reference
from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from disagg.servers.monitor import EXIT_CODE
from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, needs_vllm, running, write_hosts
from tests.integration.test_vllm import ANSWER, PREFILL, events, ids, made, prompt, require_those_of_transformers
from tests.ports import free_ports

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(1500),
]
PATIENCE_S = 300.0
LONG = 3000
STEP = 2 * int(PREFILL["chunk_tokens"])  # rows that may be under way when a rank stops
NODES = ("m-prefill", "m-second")


@pytest.fixture(scope="module", params=["pipeline_parallel", "tensor_parallel"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A pipeline of qwen3, or two ranks that share the heads of a model with states."""
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "pipeline_parallel":
        model = tiny_models.make("qwen3", folder / "model", num_hidden_layers=2)
    else:
        model = made("nemotron_h", folder)
    port, meeting = free_ports(2)
    nodes = {**PREFILL, request.param: 2, "nnodes": 2, "head_address": f"127.0.0.1:{meeting}"}
    hosts = write_hosts(folder, {"m": model}, prefill_engine="vllm", prefill=nodes)
    add_node(hosts, port)
    with running(hosts) as fleet:
        yield fleet


def add_node(hosts: Path, port: int) -> None:
    """The second node, as the first one but for its name, port and rank."""
    text = hosts.read_text()
    first = text[text.index("[hosts.m-prefill]") : text.index("[hosts.m-decode]")]
    lines = [f"port = {port}" if line.startswith("port =") else line for line in first.splitlines()]
    second = "\n".join(lines).replace("m-prefill", "m-second")
    hosts.write_text(f"{text}\n{second}\nnode_rank = 1\n")


def worker(fleet: RunningFleet, host: str) -> psutil.Process:
    """The process of a node's rank."""
    below = psutil.Process(fleet.processes[host].pid).children(recursive=True)
    (found,) = [process for process in below if "Worker" in process.name()]
    return found


async def test_two_nodes_give_the_tokens_of_one_machine_and_each_sends_its_heads_or_layers(fleet: RunningFleet) -> None:
    tokens = prompt(300)
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        handed_over = await client.generate("m", tokens=tokens, **ANSWER)
        alone = await client.generate("m", tokens=tokens, alone="decode", cache_salt="alone", **ANSWER)
    assert handed_over.metrics.method == "disaggregated"
    assert ids(handed_over) == ids(alone) and len(set(ids(alone))) > 12
    require_those_of_transformers(fleet, [tokens], [handed_over])
    (sent,) = events(fleet, "kv_of_ranks")
    whole, states = whole_and_states(fleet.folder / "model", len(tokens) - 1)
    assert handed_over.metrics.kv_bytes == whole
    assert sorted(sent["kv_bytes"]) == [(whole - states) // 2, (whole - states) // 2 + states]


def whole_and_states(model: Path, tokens: int) -> tuple[int, int]:
    """Bytes of the KV of so many tokens, and those of its states, which the first rank sends."""
    layout = Reference.open(model, 4096).layout("float32")
    return layout.nbytes(tokens), sum(layer.state_bytes for layer in layout.layers)


@pytest.mark.parametrize("fleet", ["tensor_parallel"], indirect=True)
async def test_a_request_whose_rank_on_another_machine_is_killed_while_it_sends_is_answered_exactly(
    fleet: RunningFleet,
) -> None:
    """The rank is stopped before it is killed, so that its prompt is not complete by then, however fast that is. Both
    nodes end themselves, and nothing is held."""
    ranks = [worker(fleet, host) for host in NODES]
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        tokens, asked = await half_sent(fleet, client, ranks[1])
        ranks[1].kill()
        answer = await asked
        alone = await client.generate("m", tokens=tokens, alone="decode", cache_salt="alone", **ANSWER)
    assert answer.metrics.method != "disaggregated" and answer.warnings
    assert ids(answer) == ids(alone)
    for host in NODES:
        assert fleet.processes.pop(host).wait(PATIENCE_S) == EXIT_CODE
    wait_until(lambda: not any(process.is_running() for process in ranks), PATIENCE_S, "the ranks to end")
    status = fleet.status("m-decode")
    assert (status["running"], status["queue"], status["kv_bytes"]) == (0, 0, 0)


def tokens_left(fleet: RunningFleet) -> int:
    """Prompt tokens that are not computed yet."""
    with fleet.http("m-prefill") as http:
        return int(http.get("/load").json()["queue_tokens"])


async def half_sent(
    fleet: RunningFleet, client: AsyncClient, rank: psutil.Process
) -> tuple[list[int], asyncio.Task[Completion]]:
    """A prompt of which this rank, stopped, has computed a part, and what answers it."""
    for seed in range(1000):
        tokens = prompt(LONG, seed)
        asked = asyncio.create_task(client.generate("m", tokens=tokens, cache_salt="killed", **ANSWER))
        left = 0
        while not (asked.done() or 0 < left < LONG - 1):
            left = await asyncio.to_thread(tokens_left, fleet)
        rank.send_signal(signal.SIGSTOP)
        left = await asyncio.to_thread(tokens_left, fleet)
        if left > STEP and not asked.done():
            return tokens, asked
        rank.send_signal(signal.SIGCONT)
        await asked
    raise AssertionError("every prompt was computed too soon")
