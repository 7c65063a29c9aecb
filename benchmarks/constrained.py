"""What it costs that the form of an answer is followed in a process of its own.

    python -m benchmarks.constrained [--vocab 2048 151936] [--answers 20]

Random answers of 60 tokens that fit a schema, token by token: with llguidance in this process, as it was done before,
and by `engines/model/constraint.py`, whose process finds the mask while the model computes. Both ways alternate, answer
for answer. Printed are microseconds per token, medians of all: what the engine's thread waits for a token and its mask,
if the model takes no time and if it takes 5 ms; and the mean CPU time of all processes together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import llguidance
import llguidance.numpy
import numpy
import psutil

from disagg.engines.model.constraint import Constraints

SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string"}, "minItems": 5, "maxItems": 9},
        "count": {"type": "integer"},
    },
    "required": ["names", "count"],
    "additionalProperties": False,
}
GRAMMAR = f"start: form\nform: %json {json.dumps(SCHEMA)}\n"
TOKENS = 60
MODEL_S = 0.005


class Spent(NamedTuple):
    """Microseconds per token."""

    waited: float
    waited_beside_model: float
    cpu: float


def tokenizer_json(vocab: int) -> str:
    """Bytes, and words of letters up to the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["</s>", *alphabet])}
    chance = random.Random(1)
    while len(words) < vocab:
        words.setdefault("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))), len(words))
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return str(tokenizer.to_str())


def choose(allowed: Any, chance: random.Random) -> int:
    return int(chance.choice(numpy.flatnonzero(allowed)))


def here(text: str, vocab: int, model_s: float, seed: int) -> tuple[list[float], float]:
    """Seconds of each token in this process, and CPU seconds per token."""
    tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab, eos_token=0)
    matcher = llguidance.LLMatcher(tokenizer, GRAMMAR)
    bits = numpy.zeros((1, (vocab + 31) // 32), dtype=numpy.int32)

    def step(token: int | None) -> Any:
        if token is not None:
            matcher.consume_token(token)
        time.sleep(model_s)
        began = time.perf_counter()
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        mask = numpy.unpackbits(bits.view(numpy.uint8)[0], count=vocab, bitorder="little").astype(numpy.bool_)
        return mask, time.perf_counter() - began

    return _answer(step, random.Random(seed), psutil.Process())


async def apart(constraints: Constraints, model_s: float, seed: int) -> tuple[list[float], float]:
    """The same by a process of its own."""
    with closing(await constraints.make(GRAMMAR)) as constraint:

        def step(token: int | None) -> Any:
            if token is not None:
                constraint.accept(token)
            time.sleep(model_s)
            began = time.perf_counter()
            mask = constraint.allowed()
            return mask, time.perf_counter() - began

        return _answer(step, random.Random(seed), psutil.Process())


def _answer(
    step: Callable[[int | None], Any], chance: random.Random, process: psutil.Process
) -> tuple[list[float], float]:
    mask, _ = step(None)
    spent, before = list[float](), _cpu_s(process)
    for _ in range(TOKENS):
        mask, seconds = step(choose(mask, chance))
        if mask is None:
            break
        spent.append(seconds)
    return spent, (_cpu_s(process) - before) / max(1, len(spent))


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of this process and its children so far."""
    family = (process, *process.children(recursive=True))
    return float(sum(sum(one.cpu_times()[:2]) for one in family))


async def measured(vocab: int, answers: int) -> tuple[Spent, Spent]:
    """In this process, and apart."""
    text = tokenizer_json(vocab)
    constraints = Constraints(lambda: text, vocab, frozenset({0}))
    ways: Sequence[list[Any]] = ([], [], [], [])
    for seed in range(answers):
        for number, model_s in enumerate((0.0, MODEL_S)):
            ways[number].append(here(text, vocab, model_s, seed))
            ways[2 + number].append(await apart(constraints, model_s, seed))
    constraints.close()
    medians = [1e6 * statistics.median(second for spent, _ in way for second in spent) for way in ways]
    cpu = [1e6 * statistics.mean(cpu for _, cpu in way) for way in ways]
    return Spent(medians[0], medians[1], cpu[0]), Spent(medians[2], medians[3], cpu[2])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vocab", type=int, nargs="+", default=[2048, 151_936])
    options.add_argument("--answers", type=int, default=20)
    args = options.parse_args()
    for vocab in args.vocab:
        ways = asyncio.run(measured(vocab, args.answers))
        for name, spent in zip(("in this process", "in its own"), ways, strict=True):
            print(
                f"vocabulary of {vocab}, {name}: {spent.waited:.0f} us per token, {spent.waited_beside_model:.0f} "
                f"beside a model of {1e3 * MODEL_S:g} ms, {spent.cpu:.0f} of CPU"
            )


if __name__ == "__main__":
    main()
