"""The table of docs/architectures.md, the configurations that have rows in it, and what disagg itself reads of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.engines.model.architectures.patches import PATCHES
from disagg.errors import DisaggError
from disagg.files import replace_file
from disagg.planning import refusals
from disagg.planning.verdicts import FILE
from tests import tiny_models
from tests.engines.architectures.configs import CONFIGS, config

FIRST, LAST = "<!-- table -->\n", "<!-- end of table -->\n"
FIRST_COUNT, LAST_COUNT = "<!-- counts -->\n", "<!-- end of counts -->\n"
FIRST_PATCH, LAST_PATCH = "<!-- patches -->\n", "<!-- end of patches -->\n"
EXACT, PATCHED, NEAR = "exact", "patched", "near (bfloat16)"
REFUSED, FAILS, NOT_ON_A_CPU = "refused", "fails", "not on a CPU"
NOT_TRIED = "–"
STATES: Mapping[str, str] = {
    EXACT: "exact",
    PATCHED: "patched",
    NEAR: "near (bfloat16)",
    REFUSED: "refused by disagg",
    FAILS: "a framework fails",
    NOT_ON_A_CPU: "not on a CPU",
    NOT_TRIED: "not tried",
    "": "not made",
}
"""What a cell of an engine begins with, and what that is called above the table."""
ENDED = "**ended**"
"""What the cell of a process that did not answer begins with."""
GOOD = (EXACT, PATCHED)
"""States of architectures that are handed over."""
ENGINES = ("transformers", "vllm", "ranks")
COLUMNS: Mapping[str, str] = {
    "layers": "layers",
    "transformers": "transformers",
    "splits": "splits",
    "vllm": "vLLM",
    "ranks": "vLLM, two ranks",
    "difference": "largest difference",
    "bytes per token": "bytes per token",
    "bytes of states": "bytes of states",
}
Row = dict[str, str]
"""Cells by the keys of COLUMNS. Empty: not made yet."""
EMPTY: Row = dict.fromkeys(COLUMNS, "")
_FRAMEWORKS_OWN = re.compile(
    r"vLLM cannot serve it: |vLLM cannot compute this model: |mlx-lm cannot load |transformers (has no class|cannot) "
    r"|.*: transformers cannot (read|load) it: "
)
"""How the errors begin that quote a framework."""
_OF_THE_CPU_BUILD = re.compile(r"requires BF16|module 'triton' has no attribute|on a CPU\b")
"""Of what vLLM's CPU build alone cannot, in what it says or in disagg's refusal on a CPU."""


def known() -> Mapping[str, dict[str, Any]]:
    plain = {name: {**tiny_models.COMMON, **entry} for name, entry in tiny_models.ARCHITECTURES.items()}
    return plain | {name: config(name) for name in CONFIGS}


def state(cell: str) -> str:
    """One of STATES; "" for a cell that shows a defect."""
    found = cell.partition(": ")[0]
    return found if found in STATES else ""


def is_made(cell: str) -> bool:
    """Whether a cell needs no other run: it is not empty, and shows no defect."""
    return bool(cell) and not cell.startswith("**")


def failure(error: DisaggError, folder: Path) -> str:
    """The cell of an engine that does not serve the model in this folder."""
    text = error.message.removeprefix(f"{folder}: ")
    kind = FAILS if _FRAMEWORKS_OWN.match(text) else REFUSED
    return f"{NOT_ON_A_CPU if _OF_THE_CPU_BUILD.search(text) else kind}: {short(text, folder)}"


def read_table(page: Path) -> dict[str, Row]:
    rows = [_cells(line) for line in between(page, FIRST, LAST)[1].splitlines()[2:]]
    return {name: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows}


def write_cells(page: Path, name: str, cells: Mapping[str, str]) -> None:
    """Put cells into the row of this name, a new one if there is none."""
    rows = read_table(page)
    rows[name] = {**EMPTY, **rows.get(name, {}), **cells}
    write_table(page, rows)


def write_table(page: Path, rows: Mapping[str, Row]) -> None:
    """Write the page's table, by the names of its rows, with what is counted in it above it."""
    rows = dict(sorted(rows.items()))
    head = f"| model type | {' | '.join(COLUMNS.values())} |\n|{' --- |' * (len(COLUMNS) + 1)}\n"
    _replace(
        page, FIRST, LAST, head + "".join(f"| {one} | {' | '.join(row.values())} |\n" for one, row in rows.items())
    )
    _replace(page, FIRST_COUNT, LAST_COUNT, counts(rows))


def counts(rows: Mapping[str, Row]) -> str:
    """How many rows are in each state, and which model types disagg refuses by itself."""
    found = {engine: Counter(state(row[engine]) for row in rows.values()) for engine in ENGINES}
    shown = [one for one in STATES if any(count[one] for count in found.values())]
    lines = [f"| {len(rows)} rows | {' | '.join(STATES[one] for one in shown)} |", f"|{' --- |' * (len(shown) + 1)}"]
    lines += [f"| {COLUMNS[one]} | {' | '.join(str(count[kind]) for kind in shown)} |" for one, count in found.items()]
    types = verdicts(rows)
    for engine, done in (("transformers", "load"), ("vllm", "compute")):
        loaded = {name: state(one.get(engine, "")) for name, one in types.items()}
        loaded = {name: kind for name, kind in loaded.items() if kind in (*GOOD, NEAR, REFUSED)}
        refused = sorted(name for name, kind in loaded.items() if kind == REFUSED)
        lines += [
            "",
            f"{COLUMNS[engine]} and mlx-lm {done} {len(loaded)} model types. disagg refuses {len(refused)} of them"
            + (f": {', '.join(refused)}." if refused else "."),
        ]
    return "".join(f"{line}\n" for line in lines)


def verdicts(rows: Mapping[str, Row]) -> dict[str, dict[str, str]]:
    """Of each model type, by that of its config.json. It is refused if all of its rows are: a row with another name
    than the type's is of an unusual configuration. Of the others it is patched if one is. served: real servers were
    compared."""
    entries = known()
    found: dict[str, dict[str, str]] = {}
    for name, row in rows.items():
        entry = entries.get(name, {"model_type": name})
        of_type = found.setdefault(entry["model_type"], {})
        for engine in ("transformers", "vllm"):
            if is_made(row[engine]) and row[engine] != NOT_TRIED:
                of_type[engine] = max(of_type.get(engine, row[engine]), row[engine], key=_rank)
        if name in entries and row["transformers"] in GOOD:
            of_type["served"] = "true"
        if text_type(entry) != entry["model_type"]:
            of_type["text"] = " ".join(dict.fromkeys((*of_type.get("text", "").split(), text_type(entry))))
    return found


def write_verdicts(page: Path, file: Path = FILE) -> None:
    """Write disagg's own list from the table of the page, and what transformers has for the keys that decide."""
    found: dict[str, dict[str, Any]] = {kind: dict(one) for kind, one in verdicts(read_table(page)).items()}
    for kind in list(found):
        text, stated = _by_transformers(kind)
        if text not in (kind, ""):
            found[kind].setdefault("text", text)
        if stated:
            found.setdefault(text, {}).update(stated)
    file.write_text("\n".join(_table(kind, found[kind]) for kind in sorted(found)), "utf-8")


def _by_transformers(kind: str) -> tuple[str, dict[str, Any]]:
    """The model type of its part that reads text; of the keys that decide whether that is refused, what transformers
    has if config.json leaves them out, and what config.json calls them."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING or not hasattr(made := CONFIG_MAPPING[kind](), "get_text_config"):
        return "", {}
    text = made.get_text_config(decoder=True)
    keys = refusals.keys(str(text.model_type))
    renamed, kind_of = text.attribute_map, type(text)  # what a class states, and not what follows from other values
    stated = {key: getattr(text if key in renamed else kind_of, key, None) for key in keys}
    defaults = {key: value for key, value in stated.items() if isinstance(value, bool | int | float | str | tuple)}
    names = {key: own for key, own in text.attribute_map.items() if key in keys}
    return str(text.model_type), {key: value for key, value in (("defaults", defaults), ("names", names)) if value}


def _rank(verdict: str) -> int:
    """Of the rows of a type the best one counts, and of two that are handed over the one that is patched."""
    order = (PATCHED, EXACT, NEAR, NOT_ON_A_CPU)
    return -order.index(state(verdict)) if state(verdict) in order else -len(order)


def _table(kind: str, of_type: Mapping[str, Any]) -> str:
    lines = [f"{key} = {'true' if value == 'true' else _toml(value, quotes=3)}" for key, value in of_type.items()]
    return "".join(f"{line}\n" for line in (f"[{kind}]", *lines))


def _toml(value: Any, quotes: int = 1) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return '"' * quotes + value + '"' * quotes
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_patches(page: Path) -> None:
    """Write the page's table of patches from disagg's."""
    lines = (
        f"| {patch.what} | {patch.framework} {patch.series} | {', '.join(patch.needed_by)} |\n" for patch in PATCHES
    )
    head = "| difference | where | needed by |\n| --- | --- | --- |\n"
    _replace(page, FIRST_PATCH, LAST_PATCH, head + "".join(lines))


def text_type(entry: Mapping[str, Any]) -> str:
    """The model type of the part that reads text."""
    return str(entry.get("text_config", entry)["model_type"])


def between(page: Path, first: str, last: str) -> tuple[str, str, str]:
    """The page before a line, from there to another one, and behind that."""
    before, _, rest = page.read_text(encoding="utf-8").partition(first)
    inner, _, after = rest.partition(last)
    return before, inner, after


def _replace(page: Path, first: str, last: str, text: str) -> None:
    """In one step: a run may be interrupted at any time."""
    before, _, after = between(page, first, last)
    replace_file(page, (before + first + text + last + after).encode(), page.stat().st_mode & 0o777)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def short(text: str, folder: Path) -> str:
    """What went wrong with the model in `folder`, for a cell of a table: one line, without the folder's name."""
    line = " ".join(text.split()).replace("|", "/").removeprefix(f"{folder}: ").replace(str(folder), "the model")
    return line if len(line) <= 180 else line[:177] + "..."
