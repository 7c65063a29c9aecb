"""One table for every model type that both frameworks know: what becomes of it with each prefill engine.

    python -m tests.surveys docs/architectures.md
    python -m tests.surveys docs/architectures.md --only vllm llama qwen3
    python -m tests.surveys docs/architectures.md --anew

Makes the cells that are empty, two at a time, each in a process of its own with a limit on its time, and writes the
page after each: what is interrupted, by Ctrl-C or otherwise, goes on with the same command without --anew. Names:
their cells are made again. --anew: the table is emptied first. --only: the cells of one engine; those of vLLM are two,
alone and with two ranks. In the end planning/verdicts.toml is written from the table.

The process of a cell, its servers, vLLM and its ranks are forked from two that have imported the frameworks
(tests/preloaded). What is known (tests/engines/architectures/configs) is served by real servers, every other model type
is tried in one process. vLLM needs .venv-vllm (`make .venv-vllm/.ready`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tests.fleets import preloaded_process, vllm_process
from tests.preloaded import RUN_VARIABLE, ForkedServer, ProcessEndedError
from tests.surveys import tables
from tests.surveys.tables import ENDED, GOOD, NOT_TRIED, Row, is_made, known, short

ENGINES: Mapping[str, tuple[str, ...]] = {"transformers": ("transformers", "splits"), "vllm": ("vllm", "ranks")}
"""With the columns that show whether their cells are made."""
LIMIT_S = 300.0
AT_ONCE = 2
INTERRUPTED = 130


def cells(name: str, engine: str) -> dict[str, str]:
    """The cells of one engine in the row of a model type, made in this process. What is not handed over with
    transformers is not tried with vLLM."""
    from tests.surveys import architectures, other_models

    if engine == "vllm":
        from tests.surveys import vllm_prefill

        return vllm_prefill.cells(known()[name] if name in known() else other_models.tiny(name))
    with tempfile.TemporaryDirectory(prefix="disagg-architecture-") as folder:
        path = Path(folder)
        found = architectures.cells(name, known()[name], path) if name in known() else other_models.cells(name, path)
    tried = {} if found["transformers"] in GOOD else dict.fromkeys(ENGINES["vllm"], NOT_TRIED)
    return found | tried


def names() -> list[str]:
    """Of all rows, in their order."""
    from tests.surveys import other_models

    return sorted({*known(), *other_models.shared()})


def wanted(rows: Mapping[str, Row], chosen: Sequence[str], engine: str) -> list[str]:
    """The rows whose cells of this engine are to be made: those chosen, or all that lack one. With vLLM only what is
    handed over with transformers."""
    empty: Row = {}
    found = {name: rows.get(name, empty) for name in chosen or names()}
    handed_over = [name for name, row in found.items() if engine == "transformers" or row.get("transformers") in GOOD]
    return [name for name in handed_over if chosen or not _is_made(found[name], engine)]


def _is_made(row: Row, engine: str) -> bool:
    """Whether the cells of an engine are, in a row that can have them."""
    return all(is_made(row.get(column, "")) for column in ENGINES[engine]) and row[ENGINES[engine][0]] != NOT_TRIED


class Run:
    """One run of the command. page: that has the table."""

    def __init__(self, page: Path, chosen: Sequence[str], engines: Sequence[str], *, anew: bool) -> None:
        self._page, self._chosen, self._engines = page, chosen, engines
        self._lock, self._stopping, self._began = threading.Lock(), threading.Event(), time.monotonic()
        self._taken: dict[str, list[float]] = {engine: [] for engine in ENGINES}  # seconds of each row
        self._left: dict[str, int] = dict.fromkeys(ENGINES, 0)
        if anew:
            rows = tables.read_table(page)
            empty = dict.fromkeys(tables.COLUMNS, "")
            for name in chosen or rows:
                rows.pop(name, None)
            tables.write_table(page, {name: rows.get(name, empty) for name in sorted({*rows, *(chosen or names())})})

    def make_all(self) -> None:
        """Until no cell is left, or the run is interrupted."""
        for engine in self._engines:
            self._left[engine] = len(self._rows(engine))
        for engine in self._engines:
            rows = self._rows(engine)
            self._left[engine] = len(rows)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                made = [pool.submit(self._make, name, engine) for name in rows]
                try:
                    wait(made)
                except KeyboardInterrupt:
                    self._stopping.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            for one in made:
                one.result()

    def _rows(self, engine: str) -> list[str]:
        return wanted(tables.read_table(self._page), self._chosen, engine)

    def _make(self, name: str, engine: str) -> None:
        began = time.monotonic()
        found = made(name, engine)
        if any(cell.startswith(ENDED) for cell in found.values()) and not self._stopping.is_set():
            sys.stderr.write(f"{name}: {found}: tried once more\n")
            found = made(name, engine)
        if any(not is_made(cell) for cell in found.values()) and self._stopping.wait(1.0):
            return  # by the interruption of all processes
        with self._lock:
            tables.write_cells(self._page, name, found)
            self._taken[engine].append(time.monotonic() - began)
            self._left[engine] -= 1
            self._tell(name, engine, found)

    def _tell(self, name: str, engine: str, found: Mapping[str, str]) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        every = [taken for one in self._taken.values() for taken in one]
        remains = sum(
            left * sum(self._taken[one] or every) / len(self._taken[one] or every) for one, left in self._left.items()
        )
        shown = ", ".join(f"{column} {found[column]}" for column in ENGINES[engine] if column in found)
        left = f"{sum(self._left.values())} rows left, about {remains / AT_ONCE / 60:.0f} min"
        sys.stderr.write(f"[{minutes:02d}:{seconds:02d}] {name}: {shown} ({self._taken[engine][-1]:.0f} s; {left})\n")


def made(name: str, engine: str) -> dict[str, str]:
    """The cells, made by a process of its own."""
    with tempfile.TemporaryDirectory(prefix="disagg-cell-") as folder:
        answer, log = Path(folder) / "answer", Path(folder) / "log"
        process = preloaded_process().start(
            ["--cell", name, engine, str(answer)], os.environ, log, program="tests.surveys"
        )
        failed = _failure(process, log)
        if failed:
            return {engine: failed}
        return dict(json.loads(answer.read_text(encoding="utf-8")))


def _failure(process: ForkedServer, log: Path) -> str:
    """The cell of a process that did not answer; "" if it did."""
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{ENDED}: not answered within {LIMIT_S:g} s"
    except ProcessEndedError as error:
        return f"{ENDED} with all others: {short(str(error), log)}"
    last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
    return f"{ENDED} with exit code {code}: {short(last, log)}" if code else ""


def main(page: Path, chosen: Sequence[str], engines: Sequence[str], *, anew: bool) -> int:
    """0, or 1 if cells show a defect, or 130 if the run was interrupted."""
    os.environ.setdefault(RUN_VARIABLE, f"survey-{os.getpid()}")  # cells share the processes that have the imports
    preloaded_process()
    if "vllm" in engines:
        vllm_process()
    run = Run(page, chosen, engines, anew=anew)
    try:
        run.make_all()
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; to go on: python -m tests.surveys {page}\n")
        return INTERRUPTED
    finally:
        tables.write_verdicts(page)
        tables.write_patches(page)
    defects = [
        name for name, row in tables.read_table(page).items() if any(cell.startswith("**") for cell in row.values())
    ]
    sys.stderr.write(f"cells that show a defect: {', '.join(defects) or 'none'}\n")
    return int(bool(defects))


def make_cell(name: str, engine: str, answer: Path) -> None:
    """What a process of a cell does."""
    answer.write_text(json.dumps(cells(name, engine)), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        from disagg.engines.process import exit_without_cleanup

        make_cell(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        exit_without_cleanup(0)  # mlx's threads may abort a process at its end
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", choices=ENGINES)
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_intermixed_args()
    engines = (given.only,) if given.only else tuple(ENGINES)
    sys.exit(main(given.page, given.names, engines, anew=given.anew))
