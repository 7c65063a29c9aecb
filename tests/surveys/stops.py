"""How often a reader who follows one thing on its way goes to another file: `python -m tests.surveys.stops`.

Functions are read in the order of their first calls, each once, on one thread after the other. A function of one line
is read where it is called: its name says what it does. A stay is a run of functions of one file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from itertools import chain, groupby
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
PRODUCT = f"{ROOT / 'disagg'}/"


def files_called(action: Callable[[], object]) -> list[str]:
    """The file of each function of disagg that the action calls."""
    seen: set[CodeType] = set()
    threads: dict[int, list[str]] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in seen or not code.co_filename.startswith(PRODUCT) or code.co_name[0] == "<":
            return
        seen.add(code)
        if len({line for *_, line in code.co_lines() if line}) > 2:
            threads.setdefault(threading.get_ident(), []).append(code.co_filename.removeprefix(PRODUCT))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(chain.from_iterable(threads.values()))


def deploy() -> None:
    """One host without anything, planned and deployed to."""
    from tests.fleet.deploy.deploy_site import Site

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir()
        os.environ |= {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        site = Site(Path(folder))
        with site.deployment() as deployment:
            show("deploy", files_called(lambda: deployment.carry_out(deployment.plan())))


def checkpoint() -> None:
    """A checkpoint's config, from its file to the verdict about the loaded model."""
    from disagg.config import EngineOptions
    from disagg.engines.transformers.engine import TransformersPrefillEngine
    from tests import tiny_models

    options = EngineOptions("transformers", dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.make("qwen3_moe", Path(folder, "model"))
        calls = files_called(lambda: TransformersPrefillEngine(path, 512, options))
    show("checkpoint", calls[: len(calls) - calls[::-1].index("engines/model/profile.py")])


def show(what: str, calls: list[str]) -> None:
    stays = [name for name, _ in groupby(calls)]
    print(f"{what}: {len(stays)} stays in {len(set(stays))} files")
    for name, count in Counter(stays).most_common():
        print(f"    {count:4} {name}")


if __name__ == "__main__":
    checkpoint()
    deploy()
