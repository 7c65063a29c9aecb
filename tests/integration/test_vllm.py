"""vLLM prefills, MLX decodes: the tokens of transformers alone and of mlx-lm alone, through real servers in float32.

The prefill server runs in the environment with vLLM's CPU build, which `make test` sets up. Steps of 96 tokens leave
ragged ends; windows are 64 tokens, vLLM's blocks 128.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from disagg.verify.hosts import Divided, FleetClients, Way, verify_hosts
from tests import tiny_models
from tests.engines.architectures import configs
from tests.fleets import TOKEN, RunningFleet, needs_vllm, running, write_hosts

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(1500),
]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen3_moe": {},
    "gemma3_text": {},
    "gpt_oss_yarn": {"rms_norm_eps": 1e-5},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "nemotron_h": {"head_dim": 32, "num_attention_heads": 2},
}
"""And what their config.json has else: vLLM's attention on CPUs needs heads of 32, and these widths if it is latent;
its gpt-oss YaRN and 1e-5. `test_vllm_ranks` has qwen3."""
LENGTHS = (2, tiny_models.WINDOW - 1, tiny_models.WINDOW + 1, 129, 300, 700)
SAMPLING: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
ANSWER: dict[str, Any] = {**SAMPLING, "local_prefill": False}
PREFILL = {"chunk_tokens": 96, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp(request.param)
    model = made(request.param, folder)
    with running(write_hosts(folder, {"m": model}, prefill_engine="vllm", prefill=PREFILL)) as fleet:
        yield fleet


def made(name: str, folder: Path) -> Path:
    """A tiny checkpoint of this architecture."""
    if name in tiny_models.ARCHITECTURES:
        return tiny_models.make(name, folder / "model", **ARCHITECTURES[name])
    return tiny_models.make_from({**configs.config(name), **ARCHITECTURES[name]}, folder / "model")


def prompt(length: int, seed: int = 3) -> list[int]:
    """Token ids without the special ones at the vocabulary's beginning."""
    chance = random.Random(seed * 10_000 + length)
    return [chance.randrange(8, tiny_models.VOCAB) for _ in range(length)]


def ids(answer: Completion) -> list[int]:
    return [token.id for token in answer.tokens]


def events(fleet: RunningFleet, name: str) -> list[dict[str, Any]]:
    """The lines of this kind in the log of the prefill host."""
    lines = (json.loads(line) for line in fleet.log("m-prefill").splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == name]


def computed(fleet: RunningFleet) -> int:
    """Prompt tokens that the prefill host has run through the model."""
    return int(fleet.status("m-prefill")["counters"]["computed_prompt_tokens"])


def require_those_of_transformers(fleet: RunningFleet, prompts: list[list[int]], answers: list[Completion]) -> None:
    """The answers are those of transformers alone, which computes here."""
    from tests.engines.mlx.mlx_parts import Reference  # torch and mlx: seconds that most tests do without

    transformers = Reference(fleet.folder / "model")
    for tokens, answer in zip(prompts, answers, strict=True):
        assert ids(answer) == transformers.greedy(tokens, draft=ids(answer)), f"{len(tokens)} tokens"


async def test_every_length_gives_the_tokens_of_both_frameworks_alone(fleet: RunningFleet) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        handed_over = [
            await client.generate("m", tokens=tokens, cache_salt=f"{len(tokens)}", **ANSWER) for tokens in prompts
        ]
        alone = await asyncio.gather(
            *(
                client.generate("m", tokens=tokens, alone="decode", cache_salt=f"alone {len(tokens)}", **ANSWER)
                for tokens in prompts
            )
        )
    assert [answer.metrics.method for answer in handed_over] == ["disaggregated"] * len(LENGTHS)
    assert [ids(answer) for answer in handed_over] == [ids(answer) for answer in alone]
    require_those_of_transformers(fleet, prompts, handed_over)
    assert all(len(set(ids(answer))) > 12 for answer in handed_over)


@pytest.mark.parametrize("fleet", ["llama", "nemotron_h"], indirect=True)
async def test_a_prompt_that_begins_as_an_earlier_one_is_computed_from_there_and_answered_exactly(
    fleet: RunningFleet,
) -> None:
    """vLLM goes on from a block of the earlier one; the decode host gets all of the prompt."""
    first = prompt(300, seed=6)
    longer = [*first[:280], *prompt(150, seed=7)]
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        await client.generate("m", tokens=first, alone="prefill", cache_salt="turns", max_tokens=1)
        before = computed(fleet)
        answer = await client.generate("m", tokens=longer, cache_salt="turns", **ANSWER)
    assert answer.metrics.method == "disaggregated" and answer.metrics.held_tokens == 0
    assert computed(fleet) - before <= len(longer) - 128
    require_those_of_transformers(fleet, [longer], [answer])


@pytest.mark.parametrize("fleet", ["llama", "nemotron_h"], indirect=True)
async def test_eight_prompts_at_once_give_the_tokens_of_each_alone(fleet: RunningFleet) -> None:
    prompts = [prompt(length, seed=4) for length in range(100, 108)]
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        together = await asyncio.gather(
            *(client.generate("m", tokens=tokens, cache_salt="together", **ANSWER) for tokens in prompts)
        )
    require_those_of_transformers(fleet, prompts, together)


def test_a_gated_delta_net_in_bfloat16_is_as_near_to_each_host_alone_as_verify_wants(tmp_path: Path) -> None:
    """vLLM's CPU build computes it in no other type, with heads of 128. Prompts of a token, too, and of text."""
    entry = configs.config("qwen3_5")
    widths = {"head_dim": 32, "num_attention_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    folder = tiny_models.make_from({**entry, "text_config": {**entry["text_config"], **widths}}, tmp_path / "model")
    dtype = {"dtype": "bfloat16"}
    path = write_hosts(tmp_path, {"m": folder}, prefill_engine="vllm", prefill={**PREFILL, **dtype}, decode=dtype)
    with running(path) as fleet, fleet.client() as client:
        model = fleet.fleet.model("m")
        short = client.generate("m", tokens=prompt(2), **ANSWER)
        with FleetClients(fleet.fleet, model, TOKEN, 300.0) as clients:
            prompts = clients.prompts(Way(("m-decode",), "decode"), 200)
            undivided = Divided(4, "the host computes whole prompts")
            report = verify_hosts(fleet.fleet, model, clients.ask, prompts[:3], 24, divided=lambda *pair: undivided)
    assert short.metrics.method == "disaggregated" and len(short.tokens) == SAMPLING["max_tokens"]
    assert report.ok and report.distinct_tokens > 12, report


@pytest.mark.parametrize("fleet", ["llama"], indirect=True)
async def test_vllm_alone_ends_and_bans_as_a_decode_host_does(fleet: RunningFleet) -> None:
    tokens = prompt(60, seed=5)
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        answer = await client.generate("m", tokens=tokens, alone="decode", logprobs=0, **SAMPLING)
        free = ids(answer)
        word = next(token.bytes.decode() for token in answer.tokens if token.bytes.isalpha() and len(token.bytes) > 1)
        cases: list[dict[str, Any]] = [
            {"stop_token_ids": [free[4]]},
            {"stop_token_ids": [free[4]], "min_tokens": 9},
            {"bad_words": word},
        ]
        for options in cases:
            asked = {"tokens": tokens, **SAMPLING, **options}
            decode = await client.generate("m", alone="decode", **asked)
            prefill = await client.generate("m", alone="prefill", **asked)
            assert ids(decode) == ids(prefill) != free, options
            assert decode.finish_reason == prefill.finish_reason
