"""What the table of docs/architectures.md says of transformers on a CPU, tried with transformers on this machine's GPU.

    python -m tests.surveys.gpu cuda [NAME...] [--dtype bfloat16] [--served] [--at-once 8] [--json FILE]

A tiny random model of each type is computed on the GPU and handed over to mlx-lm on the CPU, in one process. In
float32 every answer must be the token that either framework gives alone; in bfloat16 and float16 the differences must
be within what `disagg verify` allows. --served: real servers instead, as the table's rows have them, but for splits.

Prints a line for each type: the verdict, the largest difference of log-probabilities (in half precision the KL), and
what the page says if that is something else. Ends with 1 if an answer is wrong, or fails in another way than on the
page. A type takes about three seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, get_args

from disagg.config import DType
from disagg.engines.process import exit_without_cleanup
from disagg.errors import DisaggError
from tests.surveys import other_models, tables
from tests.surveys.tables import FAILS, GOOD, failure, known, short, state

LIMIT_S: Final = 240.0
PAGE: Final = Path(__file__).parents[2] / "docs" / "architectures.md"
PROMPT, ANSWER = 200, 64
"""Tokens of what the largest difference is of, and of what is compared in half precision."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row: a model type, and how it is tried."""

    name: str
    device: str
    dtype: DType
    served: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a type. difference: as printed."""

    name: str
    verdict: str
    difference: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.verdict in GOOD or self.verdict.startswith("near")


def tried(task: Task) -> Found:
    """The row, made in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(task, theirs))
    began = time.monotonic()
    process.start()
    theirs.close()
    try:
        verdict, difference = ours.recv() if ours.poll(LIMIT_S) else (f"**not answered** within {LIMIT_S:g} s", "")
    except EOFError:
        process.join(5)
        verdict, difference = f"**ended** with exit code {process.exitcode}", ""
    finally:
        process.kill()
        process.join()
    return Found(task.name, verdict, difference, round(time.monotonic() - began, 1))


def _try(task: Task, answer: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="disagg-gpu-") as folder:
        answer.send(outcome(task, Path(folder)))
    exit_without_cleanup(0)  # mlx's threads may abort a process at its end


def outcome(task: Task, folder: Path) -> tuple[str, str]:
    """The verdict and the difference, made here."""
    from tests.engines.architectures.pairs import make

    if task.name not in known() and not other_models.has_text_class(task.name):
        return f"{FAILS}: transformers has no class for its text part alone", ""
    try:
        entry = known()[task.name] if task.name in known() else other_models.tiny(task.name)
        make(entry, folder / "model")
    except Exception as error:  # noqa: BLE001 - the row says which
        return (
            f"{FAILS}: transformers cannot build a tiny model: {type(error).__name__}: {short(str(error), folder)}",
            "",
        )
    try:
        return _served(task, entry, folder) if task.served else _handed_over(task, folder)
    except DisaggError as error:
        return failure(error, folder / "model"), ""
    except Exception as error:  # noqa: BLE001 - the row says which
        return f"**error** {type(error).__name__}: {short(str(error), folder)}", ""


def _handed_over(task: Task, folder: Path) -> tuple[str, str]:
    from tests.engines.architectures.pairs import loaded
    from tests.engines.mlx.mlx_parts import prompt

    with loaded(folder / "model", dtype=task.dtype, device=task.device) as pair:
        if task.dtype != "float32":
            return _in_half_precision(pair, task.dtype)
        found = other_models.compared(pair)
        findings = (*pair.prefill.info.preflight, *pair.decode.info.preflight)
        patched = found == "exact" and any(one.status == "patched" for one in findings)
        difference = pair.difference(prompt(PROMPT, seed=PROMPT), prompt(ANSWER, seed=1))
        return ("patched" if patched else found), f"{difference:.0e}"


def _in_half_precision(pair: Any, dtype: DType) -> tuple[str, str]:
    from disagg.verify.compare import Comparisons, EngineRun, Runs, bounds, bounds_alone
    from tests.engines.mlx.mlx_parts import prompt

    tokens, pieces = prompt(PROMPT + ANSWER, seed=3), PROMPT // 3 + 1
    runs = Runs(
        handoff=EngineRun([], pair.decode.logits(tokens, ANSWER, pair.kv(tokens[: 1 - ANSWER]))),
        prefill=EngineRun([], pair.prefill.logits(tokens, ANSWER)),
        decode=EngineRun([], pair.decode.logits(tokens, ANSWER)),
        prefill_again=EngineRun([], pair.prefill.logits(tokens, ANSWER, chunk_tokens=pieces)),
        decode_again=EngineRun([], pair.decode.logits(tokens, ANSWER, chunk_tokens=pieces)),
    )
    found = Comparisons.of(runs)
    again = found.prefill_again, found.decode_again
    limits = bounds(dtype, same_weights=True, alone=found.prefill_vs_decode, again=again)
    good = found.within(limits, bounds_alone(dtype, same_weights=True))
    pairs = found.handoff_vs_prefill, found.handoff_vs_decode
    figures = f"KL {max(one.mean_kl for one in pairs):.0e}, of {limits.max_kl:.0e}; top-1 {pairs[0].top1:.2f}"
    return (f"near ({dtype})" if good else "**differs**"), figures


def _served(task: Task, entry: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """By a prefill server on the device and a decode server on the CPU."""
    from tests import tiny_models
    from tests.engines.architectures.pairs import has_other_parts
    from tests.fleets import running, write_hosts
    from tests.surveys import architectures

    prefill = {"chunk_tokens": 48, "device": task.device}
    if has_other_parts(entry):  # the same weights, which transformers loads as they are
        tiny_models.make_from(entry["text_config"], folder / "text")
    with running(write_hosts(folder, {"m": folder / "model"}, prefill=prefill), forks=False) as fleet:
        prompts = asyncio.run(architectures.answered_by_mlx(fleet))
        found = asyncio.run(architectures.served(fleet, prompts))
        if found != "exact":
            return found, ""
        backend = fleet.status(next(name for name in fleet.fleet.hosts if "prefill" in name))["backend"]
        return found, f"by {backend}"


def main(names: Sequence[str], how: argparse.Namespace) -> int:
    """Try all, print each, and return the exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "disagg.engines.transformers.engine"])
    tasks = [Task(name, how.device, how.dtype, how.served) for name in names]
    rows, made, wrong = tables.read_table(PAGE), [], []
    with ThreadPoolExecutor(how.at_once) as pool:
        for found in pool.map(tried, tasks):
            page = rows.get(found.name, tables.EMPTY)["transformers"]
            as_there = page in GOOD if found.good else state(found.verdict) == state(page)
            wrong += [] if found.good or as_there else [found.name]
            made.append(found)
            also = "" if as_there else f"; the page: {page or 'nothing'}"
            print(f"{found.name}: {found.verdict} {found.difference} ({found.seconds:g} s){also}", flush=True)
    counts = Counter(state(found.verdict) or found.verdict for found in made)
    print(f"{dict(counts)}; {'look at ' + ', '.join(wrong) if wrong else 'as the page has it'}", flush=True)
    if how.json:
        how.json.write_text(json.dumps([asdict(found) for found in made], indent=1), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", choices=get_args(DType), default="float32")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--at-once", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--json", type=Path)
    given = parser.parse_intermixed_args()
    sys.exit(main(given.names or [*known(), *other_models.shared()], given))
