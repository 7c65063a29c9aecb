"""How often a reader who follows one thing on its way goes to another file: `python -m tests.surveys.stops [THING...]`.

Functions are read in the order of their first calls, each once, on one thread after the other, in every process. A
function of one line is read where it is called: its name says what it does. A stay is a run of functions of one file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
PRODUCT = f"{ROOT / 'disagg'}/"
FOLDER = "DISAGG_STOPS"
"""The variable with the folder in which the processes note what they call, while there is a file `now` in it."""
LOOK_S = 0.05
SITE = "from tests.surveys import stops\nstops.note_calls()\n"


def note_calls() -> None:
    """From now on, in this process: note the first call of each function, on every thread that begins later."""
    folder = Path(os.environ[FOLDER])
    noted = Noted(folder)
    threading.setprofile(noted.called)
    sys.setprofile(noted.called)
    threading.Thread(target=noted.look, daemon=True).start()


class Noted:
    """The functions that this process has called while there was a file `now`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[CodeType] = set()
        self._now = False

    def look(self) -> None:
        while True:
            if (there := (self._folder / "now").exists()) and not self._now:
                self._seen.clear()
            self._now = there
            time.sleep(LOOK_S)

    def called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not self._now or event != "call" or code in self._seen or not code.co_filename.startswith(PRODUCT):
            return
        self._seen.add(code)
        if code.co_name[0] != "<" and len({line for *_, line in code.co_lines() if line}) > 2:
            thread = f"{os.getpid()}/{threading.get_ident()}"
            line = json.dumps([time.time(), thread, code.co_filename.removeprefix(PRODUCT)]) + "\n"
            with Path(self._folder, f"{os.getpid()}.calls").open("a") as file:
                file.write(line)


@contextmanager
def noted(what: str, last: str = "") -> Iterator[None]:
    """Within, calls are noted; they are shown at its end. last: the file of the last one that counts."""
    folder = Path(os.environ[FOLDER])
    (folder / "now").touch()
    time.sleep(3 * LOOK_S)
    yield
    (folder / "now").unlink()
    time.sleep(3 * LOOK_S)
    calls = sorted(json.loads(line) for path in folder.glob("*.calls") for line in path.read_text().splitlines())
    for path in folder.glob("*.calls"):
        path.unlink()
    if last:
        calls = calls[: max(number for number, (_, _, name) in enumerate(calls, 1) if name == last)]
    threads: dict[str, list[str]] = {}
    for _, thread, name in calls:
        threads.setdefault(thread, []).append(name)
    stays = [name for names in threads.values() for name, _ in groupby(names)]
    print(f"{what}: {len(stays)} stays in {len(set(stays))} files")
    for name, count in Counter(stays).most_common():
        print(f"    {count:4} {name}")


def deploy(folder: Path) -> None:
    """One host without anything, planned and deployed to."""
    from tests.fleet.site import Site

    (folder / "home").mkdir()
    os.environ |= {"HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"}
    site = Site(folder)
    with site.deployment() as deployment, noted("deploy"):
        deployment.carry_out(deployment.plan())


def block(folder: Path) -> None:
    """A block of KV, after the first one of its transfer."""
    from disagg.kv.transfer import Transfer
    from tests.kv.kv_parts import Cache, header_for, mixed_layout, start_receiver

    receiver, cache = start_receiver(), Cache.random(mixed_layout(), 23)
    slot = receiver.issue(cache)
    first, *others = cache.blocks(64)
    with Transfer.open("127.0.0.1", receiver.server.port, header_for(slot), deadline=time.monotonic() + 60) as transfer:
        transfer.send(first)
        time.sleep(1.0)
        with noted("a KV block"):
            transfer.send(others[0])
            time.sleep(1.0)
        for other in others[1:]:
            transfer.send(other)
        transfer.finish()
    receiver.server.close()


def request(folder: Path) -> None:
    """A request that is handed over, from the caller to its answer; and a token in the middle of another one's."""
    from disagg.config import load
    from disagg.fleet.lifecycle.fleet_servers import FleetServers
    from disagg.fleet.lifecycle.state import State
    from disagg.inference.client import Client
    from tests.simulated import write_simulated

    fleet = load(write_simulated(folder, prefill="h200-sxm", decode="m4-max"))
    state = State.of(fleet, folder / "state")
    servers = FleetServers(fleet, state)
    assert all(one.ok for one in servers.start(timeout_s=120))
    try:
        with Client(fleet, token=state.tokens.current) as client:
            tokens = list(range(600))
            client.generate("m", tokens=tokens, max_tokens=4, local_prefill=False)
            with noted("a chat request"):
                client.generate("m", tokens=tokens[::-1], max_tokens=4, local_prefill=False)
            with client.stream("m", tokens=tokens[::2], max_tokens=400, local_prefill=False) as stream:
                for number, _ in enumerate(stream):
                    if number == 20:
                        with noted("a token"):
                            for _ in zip(range(8), stream, strict=False):
                                pass
    finally:
        servers.stop()


def checkpoint(folder: Path) -> None:
    """A checkpoint's config, from its file to the verdict about the loaded model."""
    from disagg.config import EngineOptions
    from disagg.engines.transformers.engine import TransformersPrefillEngine
    from tests import tiny_models

    options = EngineOptions("transformers", dtype="float32", device="cpu")
    path = tiny_models.make("qwen3_moe", folder / "model")
    with noted("a checkpoint's config", last="engines/model/profile.py"):
        TransformersPrefillEngine(path, 512, options)


THINGS = {"deploy": deploy, "block": block, "request": request, "checkpoint": checkpoint}

if __name__ == "__main__":
    for thing in sys.argv[1:] or THINGS:
        with tempfile.TemporaryDirectory() as place:
            made = Path(place)
            (made / "calls").mkdir()
            (made / "sitecustomize.py").write_text(SITE)
            os.environ |= {FOLDER: f"{made}/calls", "PYTHONPATH": f"{made}:{ROOT}"}
            note_calls()
            THINGS[thing](made)
