"""How often a reader who follows one thing on its way goes to another file: `python -m tests.surveys.stops`.

Functions are read in the order of their first calls, each once. A stay is a run of functions of one file.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
PRODUCT = f"{ROOT / 'disagg'}/"


def files_called(action: Callable[[], object]) -> list[str]:
    """The file of each function of disagg that the action calls, in the order of first calls; also on threads that it
    starts."""
    functions: dict[CodeType, str] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(PRODUCT)
            and code.co_name[0] != "<"
            and len({line for *_, line in code.co_lines() if line}) > 2
        ):
            functions.setdefault(code, code.co_filename.removeprefix(PRODUCT))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(functions.values())


def show(what: str, calls: list[str]) -> None:
    stays = [name for name, _ in groupby(calls)]
    print(f"{what}: {len(stays)} stays in {len(set(stays))} files")
    for name, count in Counter(stays).most_common():
        print(f"    {count:4} {name}")
