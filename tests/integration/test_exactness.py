"""Hand-off = transformers alone = mlx-lm alone, token for token, through real servers in float32.

Prefill runs in chunks of 48 tokens, so every prompt here that is longer leaves a ragged end; windows are 64 tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from disagg.config import load
from disagg.engines.model.reference import Reference
from disagg.inference.attempt import Alone
from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from disagg.kv.blocks import KVBlock
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.transfer import Transfer
from tests import tiny_models
from tests.fleets import TOKEN, RunningFleet, running, write_hosts

ARCHITECTURES = [
    "llama", "llama3", "qwen2", "qwen3", "qwen3_moe", "phi3", "mistral", "gpt_oss", "gpt_oss_yarn", "gemma3_text",
    "glm4_moe", "smollm3", "cohere2",
]  # fmt: skip
WINDOW = tiny_models.WINDOW
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 200)
BY_PREFILL_SERVER = (2, WINDOW + 1)
"""The answers to the others are compared with transformers itself, which is quicker."""
DIVIDED = (WINDOW + 1, 200)
SAMPLING: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
ANSWER: dict[str, Any] = {**SAMPLING, "local_prefill": False}
SHORT_ANSWER: dict[str, Any] = {**ANSWER, "max_tokens": 24}
"""Of the requests that have the batch or a prefill host to themselves. Prompts of 63 to 65 tokens leave the window in
these, too."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.make(request.param, folder / "model")
    with running(write_hosts(folder, {"m": model}, prefill={"chunk_tokens": 48})) as fleet:
        yield fleet


def prompt(length: int, seed: int = 3) -> list[int]:
    """Token ids without the special ones at the vocabulary's beginning."""
    chance = random.Random(seed * 10_000 + length)
    return [chance.randrange(8, tiny_models.VOCAB) for _ in range(length)]


def ids(answer: Completion) -> list[int]:
    return [token.id for token in answer.tokens]


def computed_prompt_tokens(fleet: RunningFleet) -> int:
    return int(fleet.status("m-decode")["counters"]["computed_prompt_tokens"])


@pytest.fixture(scope="module")
def together(fleet: RunningFleet) -> dict[int, Completion]:
    """The answers to all lengths, handed over at the same time."""

    async def answers() -> list[Completion]:
        async with AsyncClient(fleet.fleet, token=TOKEN) as client:
            return await asyncio.gather(
                *(client.generate("m", tokens=prompt(n), cache_salt=f"together {n}", **ANSWER) for n in LENGTHS)
            )

    before = computed_prompt_tokens(fleet)
    answered = dict(zip(LENGTHS, asyncio.run(answers()), strict=True))
    assert computed_prompt_tokens(fleet) - before == len(LENGTHS)
    return answered


async def test_every_length_gives_the_tokens_of_each_engine_alone(
    fleet: RunningFleet, together: dict[int, Completion]
) -> None:
    from tests.engines.mlx.mlx_parts import Reference  # torch and mlx: seconds that most tests do without

    transformers = Reference(fleet.folder / "model")
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def alone(engine: Alone, length: int, options: dict[str, Any]) -> tuple[int, Completion]:
            salt = f"{engine} {length}"  # each computes its whole prompt
            return length, await client.generate("m", tokens=prompt(length), alone=engine, cache_salt=salt, **options)

        by_decode = await asyncio.gather(*(alone("decode", length, ANSWER) for length in LENGTHS))
        by_prefill = await asyncio.gather(*(alone("prefill", length, SHORT_ANSWER) for length in BY_PREFILL_SERVER))
    count = SHORT_ANSWER["max_tokens"]
    assert {length: ids(answer) for length, answer in by_decode} == {n: ids(answer) for n, answer in together.items()}
    assert [(length, ids(answer)) for length, answer in by_prefill] == [
        (length, ids(together[length])[:count]) for length in BY_PREFILL_SERVER
    ]
    for length, answer in together.items():
        assert len(set(ids(answer))) > 12, "constant text proves nothing"
        assert ids(answer) == transformers.greedy(prompt(length), draft=ids(answer)), f"{length} tokens"


def test_requests_that_join_a_running_batch_are_answered_as_each_by_itself(
    fleet: RunningFleet, together: dict[int, Completion]
) -> None:
    count = SHORT_ANSWER["max_tokens"]
    with fleet.client() as client:
        for length in LENGTHS:
            before = computed_prompt_tokens(fleet)
            answer = client.generate("m", tokens=prompt(length), cache_salt=f"by itself {length}", **SHORT_ANSWER)
            assert computed_prompt_tokens(fleet) - before == 1
            # Of a prompt of one token nothing is handed over: the decode host computes the last token in any case.
            assert answer.metrics.method == ("disaggregated" if length > 1 else "local")
            assert ids(answer) == ids(together[length])[:count], f"{length} tokens"


async def test_prompts_whose_layers_both_hosts_compute_are_answered_as_by_each_alone(
    fleet: RunningFleet, together: dict[int, Completion]
) -> None:
    """All at a time, and then a conversation that goes on, of which both hosts hold the beginning."""
    count = SHORT_ANSWER["max_tokens"]
    layers = Reference.open(fleet.folder / "model", None, 8192).split.layers
    heads = sorted({max(1, round(layers * share)) for share in (0.25, 0.5, 0.75)})
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def split(tokens: list[int], k: int, salt: str) -> Completion:
            return await client.generate("m", tokens=tokens, split=k, cache_salt=salt, **SHORT_ANSWER)

        ways = [(k, length) for k in heads for length in DIVIDED]
        answers = await asyncio.gather(*(split(prompt(length), k, f"{k} of {length}") for k, length in ways))
        for (k, length), answer in zip(ways, answers, strict=True):
            assert (answer.metrics.method, answer.metrics.layers) == ("disaggregated", k)
            assert ids(answer) == ids(together[length])[:count], f"{k} of {layers} layers of {length} tokens"
        (k, length), answer = ways[-1], answers[-1]
        longer = [*prompt(length), *ids(answer)[:4], *prompt(90)]
        more, alone = await asyncio.gather(
            split(longer, k, f"{k} of {length}"),
            client.generate("m", tokens=longer, alone="decode", cache_salt="longer", **SHORT_ANSWER),
        )
    assert more.metrics.held_tokens >= length - 1 and more.metrics.layers == k
    assert ids(more) == ids(alone), f"{k} of {layers} layers of {len(longer)} tokens, {length} of them held"


def test_wrong_kv_is_refuted_and_the_answer_is_right(fleet: RunningFleet, together: dict[int, Completion]) -> None:
    """Noise of the right shape under the right ticket. That wrong KV changes an answer if nobody audits it is a control
    of `disagg verify`."""
    count = SHORT_ANSWER["max_tokens"]
    tokens, right = prompt(200), ids(together[200])[:count]
    body = {"model": "m", "tokens": tokens, "sampling": {**SAMPLING, "max_tokens": count}, "cache_salt": "noise"}
    with fleet.http("m-decode") as http, http.stream("POST", "/decode", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: slot"
        slot = json.loads(next(lines).removeprefix("data: "))
        sender = threading.Thread(target=send_noise, args=(fleet, slot, tokens))
        sender.start()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        sender.join()
    assert [event["blamed"] for event in events if "blamed" in event] == [True]
    assert [token["id"] for event in events for token in event.get("tokens", ())] == right
    assert events[-1]["computed_prompt_tokens"] == len(tokens) and "layer" in events[-1]["refuted"]


def send_noise(fleet: RunningFleet, slot: dict[str, object], tokens: list[int]) -> None:
    reference = Reference.open(fleet.fleet.models["m"].sources["mlx"], 8192)
    layout, n = reference.layout("float32"), len(tokens) - 1
    header = Header(str(slot["ticket"]), str(slot["request_id"]), reference.fingerprint, layout, token_hash(tokens), n)
    port = load(fleet.fleet.path).hosts["m-decode"].kv_port
    assert port is not None
    noise = numpy.random.default_rng(5)
    with Transfer.open("127.0.0.1", port, header, deadline=time.monotonic() + 30) as transfer:
        for index, layer in enumerate(layout.layers):
            rows = layer.rows(n)
            keys, values = (
                [noise.standard_normal((len(rows), dim)).astype("float32") for _ in range(layer.kv_heads)]
                for dim in (layer.key_dim, layer.value_dim)
            )
            key_views, value_views = ([head.data.cast("B") for head in heads] for heads in (keys, values))
            transfer.send(KVBlock(index, rows.start, rows.stop, key_views, value_views))
        transfer.finish()
