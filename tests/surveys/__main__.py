"""One table for every model type that both frameworks know: what becomes of it with each prefill engine.

    python -m tests.surveys docs/architectures.md
    python -m tests.surveys docs/architectures.md --only vllm llama qwen3

Fills the cells that are empty, two at a time, each in a process of its own with a limit on its time, and writes the
page after each: what is interrupted goes on where it ended. Names: their cells are made again. --anew: all are.
--only: cells of one engine. In the end planning/verdicts.toml is written from the table.

What is known (tests/engines/architectures/configs) is served by real servers, every other model type is tried in one
process. vLLM needs .venv-vllm (`make .venv-vllm/.ready`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from tests.surveys import tables
from tests.surveys.tables import Row, known

ENGINES = ("transformers", "vllm", "ranks")
LIMIT_S = 600.0
AT_ONCE = 2


def cells(name: str, engine: str) -> dict[str, str]:
    """The cells of one engine in the row of a model type, made in this process."""
    if engine == "transformers":
        return _with_transformers(name)
    from tests.surveys import other_models, vllm_prefill

    entry = known()[name] if name in known() else other_models.tiny(name)
    made = vllm_prefill.row(entry, ranks=2 if engine == "ranks" else 1)
    return {engine: made.split(" | ")[0].strip()}


def _with_transformers(name: str) -> dict[str, str]:
    from tests.surveys import architectures, other_models

    if name not in known():
        found, _, difference = other_models.tried(name).partition(" | ")
        return {"transformers": found, "splits": "–", "difference": difference.strip()}
    entry = known()[name]
    with tempfile.TemporaryDirectory(prefix="disagg-architecture-") as folder:
        found, splits, difference = architectures.verdict(entry, Path(folder))
    kept, per_token, states = architectures.sizes(name, entry)
    return {
        "layers": kept,
        "transformers": found,
        "splits": splits or "–",
        "difference": difference,
        "bytes per token": per_token,
        "bytes of states": states,
    }


def made(name: str, engine: str) -> dict[str, str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.surveys", "--cell", name, engine]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {engine: f"**not answered** within {LIMIT_S:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {engine: f"**ended** with exit code {done.returncode}: {tables.short(last, Path('/'))}"}
    found: dict[str, str] = json.loads(lines[-1])
    return found


def names() -> list[str]:
    """Of all rows: what is known, then every other model type that both frameworks know."""
    from tests.surveys import other_models

    return [*known(), *other_models.shared()]


def wanted(rows: Mapping[str, Row], chosen: Sequence[str], engines: Sequence[str], anew: bool) -> list[tuple[str, str]]:
    """The cells to make. With vLLM only what is handed over with transformers."""
    empty: Row = {}
    return [
        (name, engine)
        for engine in engines
        for name in chosen or names()
        if (chosen or anew or not rows.get(name, empty).get(engine))
        and (engine == "transformers" or rows.get(name, empty).get("transformers") in tables.GOOD)
    ]


def main(page: Path, chosen: Sequence[str], engines: Sequence[str], *, anew: bool) -> None:
    lock = Lock()

    def make(cell: tuple[str, str]) -> None:
        found = made(*cell)
        with lock:
            tables.write_cells(page, cell[0], found)
        sys.stderr.write(f"{cell[0]}: {found}\n")

    for engine in engines:
        todo = wanted(tables.read_table(page), chosen, [engine], anew)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(make, todo))
    tables.write_verdicts(page)
    tables.write_patches(page)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        from disagg.engines.process import exit_without_cleanup

        sys.stdout.write("\n" + json.dumps(cells(*sys.argv[2:4])) + "\n")
        sys.stdout.flush()
        exit_without_cleanup(0)  # mlx's threads may abort a process at its end
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", choices=ENGINES)
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_intermixed_args()
    main(given.page, given.names, (given.only,) if given.only else ENGINES, anew=given.anew)
