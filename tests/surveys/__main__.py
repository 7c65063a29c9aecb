"""One table for every model type that both frameworks know: what becomes of it with each prefill engine.

    python -m tests.surveys docs/architectures.md
    python -m tests.surveys docs/architectures.md --only vllm llama qwen3
    python -m tests.surveys docs/architectures.md --anew

Makes the cells that are empty, two at a time, each in a process of its own with a limit on its time, and writes the
page after each: what is interrupted, by Ctrl-C or otherwise, goes on with the same command without --anew. Names:
their cells are made again. --anew: the table is emptied first. --only: the cells of one engine; those of vLLM are two,
alone and with two ranks. In the end planning/verdicts.toml is written from the table.

The process of a cell, its servers, vLLM and its ranks are forked from two that have imported the frameworks
(tests/preloaded). What is known (tests/engines/architectures/configs) has a configuration in a published form, every
other model type transformers' default one, shrunk. vLLM needs .venv-vllm (`make .venv-vllm/.ready`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tests.fleets import VLLM_MISSING, preloaded_process, vllm_process
from tests.preloaded import RUN_VARIABLE, ForkedServer, ProcessEndedError
from tests.surveys import tables
from tests.surveys.tables import ENDED, GOOD, NOT_TRIED, Row, is_made, known, short

_OF_VLLM = ("vllm", "ranks")
ENGINES: Mapping[str, tuple[str, ...]] = {
    "transformers": tuple(column for column in tables.COLUMNS if column not in _OF_VLLM),
    "vllm": _OF_VLLM,
}
"""With their columns."""
LIMIT_S = 300.0
AT_ONCE = 2
INTERRUPTED = 130
ANSWER = "cells.json"
"""In the folder of a process."""


def cells(name: str, engine: str, folder: Path) -> dict[str, str]:
    """The cells of one engine in the row of a model type, made in this process. folder: of its own. What is not handed
    over with transformers is not tried with vLLM."""
    from tests.surveys import architectures, other_models

    entry = known().get(name)
    if engine == "vllm":
        from tests.surveys import vllm_prefill

        return vllm_prefill.cells(entry or other_models.tiny(name), folder)
    found = architectures.cells(name, entry, folder) if entry else other_models.cells(name, folder)
    return found if found["transformers"] in GOOD else found | dict.fromkeys(_OF_VLLM, NOT_TRIED)


def names() -> list[str]:
    """Of all rows, in their order."""
    from tests.surveys import other_models

    return sorted({*known(), *other_models.shared()})


def wanted(rows: Mapping[str, Row], chosen: Sequence[str], engine: str) -> list[str]:
    """The rows whose cells of this engine are to be made: those chosen, or all that lack one. With vLLM only what is
    handed over with transformers."""
    found = {name: rows.get(name, tables.EMPTY) for name in chosen or names()}
    handed_over = [name for name, row in found.items() if engine == "transformers" or row["transformers"] in GOOD]
    return [name for name in handed_over if chosen or not _is_made(found[name], engine)]


def _is_made(row: Row, engine: str) -> bool:
    """Whether the cells of an engine are, in a row that can have them."""
    return all(is_made(row[column]) for column in ENGINES[engine]) and row[engine] != NOT_TRIED


def emptied(rows: Mapping[str, Row], chosen: Sequence[str], engines: Sequence[str]) -> dict[str, Row]:
    """The rows of a table in which these cells are made anew."""
    cells = {column: "" for engine in engines for column in ENGINES[engine]}
    anew = {name: {**tables.EMPTY, **rows.get(name, {}), **cells} for name in chosen or names()}
    return {**rows, **anew} if chosen else anew


class Run:
    """One run of the command. page: that has the table."""

    def __init__(self, page: Path, chosen: Sequence[str], engines: Sequence[str]) -> None:
        self._page, self._chosen, self._engines = page, chosen, engines
        self._lock, self._stopping, self._began = threading.Lock(), threading.Event(), time.monotonic()
        self._taken: dict[str, list[float]] = {engine: [] for engine in engines}  # seconds of each row
        rows = tables.read_table(page)
        self._left = {engine: len(wanted(rows, chosen, engine)) for engine in engines}
        if len(engines) > 1:  # more of them may be handed over
            self._left["vllm"] += sum(not is_made(row["transformers"]) for row in rows.values())

    def make_all(self) -> None:
        """Until no cell is left, or the run is interrupted."""
        for engine in self._engines:
            rows = wanted(tables.read_table(self._page), self._chosen, engine)
            self._left[engine] = len(rows)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                made = [pool.submit(self._make, name, engine) for name in rows]
                try:
                    wait(made)
                except KeyboardInterrupt:
                    self._stopping.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    preloaded_process().close()  # the processes of the cells end
                    raise
            for one in made:
                one.result()

    def _make(self, name: str, engine: str) -> None:
        began = time.monotonic()
        found = made(name, engine)
        if any(cell.startswith(ENDED) for cell in found.values()) and not self._stopping.is_set():
            sys.stderr.write(f"{name}: {found}: tried once more\n")
            found = made(name, engine)
        if any(not is_made(cell) for cell in found.values()) and self._stopping.wait(1.0):
            return  # its process was ended, too
        with self._lock:
            if self._stopping.is_set():
                return
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
    with tempfile.TemporaryDirectory(prefix="disagg-survey-") as path:
        folder, log = Path(path), Path(path) / "log"
        process = preloaded_process().start(["--cell", name, engine, path], os.environ, log, program="tests.surveys")
        failed = _failure(process, log)
        return {engine: failed} if failed else dict(json.loads((folder / ANSWER).read_text(encoding="utf-8")))


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
    """0, or 1 if cells show a defect, 2 if vLLM is missing, or 130 if the run was interrupted."""
    if "vllm" in engines and VLLM_MISSING:
        sys.stderr.write(f"{VLLM_MISSING}\n")
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):  # a background process of a shell ignores the first
        signal.signal(number, signal.default_int_handler)
    os.environ.setdefault(RUN_VARIABLE, f"survey-{os.getpid()}")  # cells share the processes that have the imports
    try:
        preloaded_process()
        if "vllm" in engines:
            vllm_process()
        if anew:
            tables.write_table(page, emptied(tables.read_table(page), chosen, engines))
        Run(page, chosen, engines).make_all()
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; to go on: python -m tests.surveys {page}\n")
        return INTERRUPTED
    tables.write_verdicts(page)
    tables.write_patches(page)
    defects = [
        name for name, row in tables.read_table(page).items() if any(cell.startswith("**") for cell in row.values())
    ]
    sys.stderr.write(f"rows that show a defect: {', '.join(defects) or 'none'}\n")
    return int(bool(defects))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        from disagg.engines.process import exit_without_cleanup

        folder = Path(sys.argv[4])
        (folder / ANSWER).write_text(json.dumps(cells(sys.argv[2], sys.argv[3], folder)), encoding="utf-8")
        exit_without_cleanup(0)  # mlx's threads may abort a process at its end
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", choices=ENGINES)
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_intermixed_args()
    engines = (given.only,) if given.only else tuple(ENGINES)
    sys.exit(main(given.page, given.names, engines, anew=given.anew))
