"""What real servers answer with a tiny random model of an architecture that is known: handed over, and divided.

A prefill and a decode server are started; prompts of 1 to 700 tokens are read in ragged chunks, handed over and
answered with 64 tokens in one batch. The answers are compared with those of either framework alone. Then prompts are
divided after a quarter, half and three quarters of the layers, all at once and after a held prefix, between
transformers and mlx-lm, and between two hosts with mlx-lm. Takes about 20 seconds per model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from disagg.api.events import TokenLogprob
from disagg.engines.base import Token
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import LoadedByTransformers
from disagg.engines.model.architectures.patches import TRANSFORMERS_PATCHES
from disagg.engines.model.profile import LayerProfile, layout_of
from disagg.errors import DisaggError
from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from tests import tiny_models
from tests.engines.architectures.pairs import Pair, has_other_parts, running
from tests.engines.mlx.mlx_parts import Reference, prompt, start
from tests.fleets import TOKEN, RunningFleet, write_hosts
from tests.fleets import running as running_fleet
from tests.surveys.tables import NOT_TRIED, failure, short

LENGTHS = (1, 2, 63, 64, 65, 200, 700)
DIVIDED = (65, 200, 700)
HELD = 200
TOKENS = 64
ANSWER: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
LEAST_GAP = 1e-3
"""Of the log-probabilities of the two likeliest tokens. Of closer ones rounding decides which is the likelier."""
MOST_SEEDS = 20
COLUMNS = ("transformers", "layers", "splits", "difference", "bytes per token", "bytes of states")
LEAST_LAYERS = 12  # of a published model


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and what mlx-lm alone answers."""

    tokens: Sequence[int]
    answer: Sequence[int]


class NoClearPromptError(Exception):
    """Each of the candidates of this length is answered with nearly equal tokens."""


def candidates(length: int) -> Iterator[list[int]]:
    return (prompt(length, seed=seed) for seed in range(length, length + MOST_SEEDS * 1000, 1000))


def is_clear(answer: Sequence[Token | TokenLogprob]) -> bool:
    """Whether no token of an answer was nearly as likely as another one."""
    return all(one.top[0][1] - one.top[1][1] >= LEAST_GAP for one in answer)


def clear_prompt(decode: MLXDecodeEngine, length: int, count: int) -> list[int]:
    """A prompt of this length whose answer of so many tokens is clear for mlx-lm."""
    for tokens in candidates(length):
        asked = start(decode, tokens, max_tokens=count, logprobs=2)
        asked.result()
        if is_clear(asked.tokens):
            return tokens
    raise NoClearPromptError(length)


async def answered_by_mlx(fleet: RunningFleet) -> dict[int, Asked]:
    """A prompt of each length, whose answer has no token that is nearly as likely as another one."""
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def answered(length: int) -> Asked:
            for tokens in candidates(length):
                salt = f"alone {tokens[:8]}"
                answer = await client.generate(
                    "m", tokens=tokens, alone="decode", logprobs=2, cache_salt=salt, **ANSWER
                )
                if is_clear(answer.tokens):
                    return Asked(tokens, ids(answer))
            raise NoClearPromptError(length)

        return dict(zip(LENGTHS, await asyncio.gather(*map(answered, LENGTHS)), strict=True))


async def served(fleet: RunningFleet, prompts: Mapping[int, Asked]) -> str:
    """The verdict on a running fleet: exact, or the first prompt that is answered otherwise."""
    text = fleet.folder / "text"
    reference = Reference(text if text.is_dir() else fleet.folder / "model")
    loaded = LoadedByTransformers(reference.model, reference.model.config.get_text_config(decoder=True))
    for patch in TRANSFORMERS_PATCHES:
        patch.apply(loaded)
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        handed_over = await asyncio.gather(
            *(
                client.generate("m", tokens=one.tokens, cache_salt=f"{length}", local_prefill=False, **ANSWER)
                for length, one in prompts.items()
            )
        )
    for (length, one), made in zip(prompts.items(), handed_over, strict=True):
        if ids(made) != reference.greedy(one.tokens, TOKENS, draft=ids(made)):
            return f"**differs** from transformers at {length} tokens"
        if ids(made) != one.answer:
            return f"**differs** from mlx-lm at {length} tokens"
        if length > 1 and made.metrics.method != "disaggregated":
            return f"**no hand-off**: {made.metrics.method}"
    return "exact"


async def divided(fleet: RunningFleet, asked: Mapping[int, Asked], count: int) -> str:
    """Whether prompts that are divided on a running fleet are answered as by its decode host alone, or the first that
    is not. count: layers of the model."""
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def answer(tokens: Sequence[int], salt: str, **how: Any) -> Completion:
            return await client.generate("m", tokens=tokens, cache_salt=salt, **ANSWER, **how)

        prompts = [asked[length] for length in DIVIDED]
        longest = prompts[-1]
        for layers in sorted({max(1, count // 4), count // 2, count * 3 // 4}):
            how = {"split": layers, "local_prefill": False}
            made = await asyncio.gather(*(answer(one.tokens, f"{layers}", **how) for one in prompts))
            await answer(longest.tokens[:HELD], f"{layers} held", **how)
            made += [await answer(longest.tokens, f"{layers} held", **how)]
            for asked_for, one in zip((*prompts, longest), made, strict=True):
                where = f"after {layers} layers at {len(asked_for.tokens)} tokens"
                if one.metrics.layers != layers:
                    return f"**no split** {where}"
                if ids(one) != asked_for.answer:
                    return f"**differs** {where}"
    return "exact"


def ids(answer: Completion) -> list[int]:
    return [token.id for token in answer.tokens]


def cells(name: str, entry: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Those of COLUMNS in its row. folder: of its own."""
    folder.mkdir(exist_ok=True)
    found, splits, difference = verdict(entry, folder)
    made = (*sizes(name, entry), splits, difference)
    kept, per_token, states, splits, difference = (cell or NOT_TRIED for cell in made)
    return dict(zip(COLUMNS, (found, kept, splits, difference, per_token, states), strict=True))


def verdict(entry: Mapping[str, Any], folder: Path) -> tuple[str, str, str]:
    """The verdicts on hand-offs and on splits, and the largest difference of log-probabilities along an answer after
    200 tokens."""
    model = folder / "model"
    try:
        with running(entry, model) as pair:
            findings = (*pair.prefill.info.preflight, *pair.decode.info.preflight)
            patched = [finding for finding in findings if finding.status == "patched"]
            difference, split = _difference(pair), pair.decode.info.split
    except DisaggError as error:
        return failure(error, model), "", ""
    except Exception as error:  # noqa: BLE001 - the row says which
        return f"**error** {type(error).__name__}: {short(str(error), model)}", "", ""
    if has_other_parts(entry):  # the same weights, which transformers loads as they are
        tiny_models.make_from(entry["text_config"], folder / "text")
    splits = f"refused: {split.refusal}" if split.refusal else ""
    with running_fleet(write_hosts(folder, {"m": model}, prefill={"chunk_tokens": 48})) as fleet:
        prompts = asyncio.run(answered_by_mlx(fleet))
        found = asyncio.run(served(fleet, prompts))
        splits = splits or asyncio.run(divided(fleet, prompts, split.layers))
    if splits == "exact":
        path = write_hosts(folder, {"m": model}, prefill_engine="mlx", prefill={"chunk_tokens": 48})
        with running_fleet(path) as fleet:
            splits = asyncio.run(divided(fleet, prompts, split.layers))
            splits = splits if splits == "exact" else f"from mlx-lm: {splits}"
    return ("patched" if patched and found == "exact" else found), splits, f"{difference:.0e}"


def _difference(pair: Pair) -> float:
    tokens = prompt(200, seed=200)
    return pair.difference(tokens, prompt(TOKENS, seed=1))


def sizes(name: str, entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the layers keep, bytes per token of 32,768 in bfloat16, and bytes of states: of the configuration that
    transformers has by default for this model type, usually that of a published model. Empty if it is none: it has
    few layers, or other kinds of layers than this entry, which has the form of a published one."""
    try:
        layers, tiny = layers_of(entry["model_type"], {}), layers_of(entry["model_type"], entry)
    except Exception:  # noqa: BLE001 - not all have a default configuration
        return "", "", ""
    if len(layers) < LEAST_LAYERS or {one.layout.kind for one in layers} != {one.layout.kind for one in tiny}:
        return "", "", ""
    layout = layout_of(layers, "bfloat16")
    states = sum(state.nbytes for layer in layout.layers for state in layer.states)
    per_token = (layout.nbytes(32768) - states) // 32768
    return _kinds(layers), f"{per_token:,}", f"{states:,}" if states else ""


def layers_of(model_type: str, config: Mapping[str, Any]) -> tuple[LayerProfile, ...]:
    text = CONFIG_MAPPING[model_type].from_dict(dict(config)).get_text_config(decoder=True)
    return architecture_of(text).layers(text)


def _kinds(layers: tuple[LayerProfile, ...]) -> str:
    counts: dict[str, int] = {}
    for layer in layers:
        layout = layer.layout
        name = "full and state" if layout.states and layout.kv_heads else layout.kind
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
