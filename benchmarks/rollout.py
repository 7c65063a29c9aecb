"""A rollout of a broken release to two prefill and two decode hosts, while callers have requests on them.

    python -m benchmarks.rollout [--requests 200] [--callers 3]

The hosts are the tests' four machines in namespaces, with sshd and the demo's qwen3 model, deployed and started first;
that needs root. Two releases are rolled out, each until it has gone back by itself: one whose servers do not start, and
one whose MLX hosts take the least likely token. Prints one JSON object. `failed`: requests that ended with an error.
`other_text`: answers that differ from those before the rollout, as a host of the broken release may give until it is
tested. The callers go on until the rollout has ended and `--requests` are answered.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disagg import Client
from disagg.errors import DisaggError
from disagg.inference.types import Completion
from tests.integration.deployed import ROOT, Operator, operator
from tests.testbed import bed as testbed

MODEL = "qwen3-coder:30b"
BROKEN = {
    "servers do not start": (
        "servers/__main__.py",
        "    _limit_threads(host)\n    limit",
        '    raise SystemExit("broken")\n    limit',
    ),
    "MLX hosts take the least likely token": (
        "engines/mlx/sampling.py",
        "return mx.argmax(logprobs",
        "return mx.argmin(logprobs",
    ),
}
PATIENCE_S = 240.0
ROLLOUT_S = 1800.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--callers", type=int, default=3)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-rollout-") as name, testbed.running(Path(name)) as bed:
        if not bed.real:
            raise SystemExit("this needs network namespaces: run it as root")
        folder = Path(name, "operator")
        folder.mkdir()
        with bed.entered():
            fleet = of_one_model(operator(bed, folder))
            fleet.run("deploy", "--yes", timeout=PATIENCE_S)
            fleet.run("start", "--timeout", PATIENCE_S, timeout=PATIENCE_S + 60)
            try:
                print(
                    json.dumps({what: measure(fleet, what, args.requests, args.callers) for what in BROKEN}, indent=2)
                )
            finally:
                fleet.run("stop", "--all")


def of_one_model(fleet: Operator) -> Operator:
    """The same hosts, all of one model."""
    text = fleet.config.read_text()
    other = 'model = "gpt-oss:120b"'
    assert text.count(other) == 2
    fleet.config.write_text(text.replace(other, f'model = "{MODEL}"'))
    return fleet


def measure(fleet: Operator, what: str, requests: int, callers: int) -> dict[str, Any]:
    """Roll the broken release out under load, and count."""
    before = releases(fleet)
    load = Load(connected(fleet), requests)
    with tempfile.TemporaryDirectory(dir=fleet.folder) as folder, calling(load, callers):
        operating = replace(fleet, code=str(broken(Path(folder), what)))
        began = time.monotonic()
        done = operating.run("rollout", "--yes", "--json", "--timeout", PATIENCE_S, code=1, timeout=ROLLOUT_S)
        seconds = time.monotonic() - began
    report = json.loads(done.stdout)
    return {
        "ending": report["ending"],
        "outcomes": {one["host"]: one["outcome"] for one in report["hosts"]},
        "why": next((one["error"]["message"] for one in report["hosts"] if one["error"]), report["reason"]),
        "seconds": round(seconds, 1),
        "requests": load.sent,
        "failed": len(load.errors),
        "errors": load.errors[:5],
        "other_text": load.other_text,
        "methods": load.methods,
        "every_host_runs_what_it_ran": releases(fleet) == before,
    }


def broken(folder: Path, what: str) -> Path:
    """A copy of disagg with one line changed."""
    file, old, new = BROKEN[what]
    path = shutil.copytree(Path(ROOT, "disagg"), folder / "disagg", ignore=shutil.ignore_patterns("__pycache__")) / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has changed"
    path.write_text(text.replace(old, new))
    return folder


def releases(fleet: Operator) -> dict[str, str]:
    """What runs on each host."""
    return {name: one["release"] for name, one in fleet.status().items()}


def connected(fleet: Operator) -> Client:
    """A client of the fleet; its thread, too, is in the hosts' network."""
    (file,) = (fleet.folder / "state/disagg").glob("*/token")
    return Client(fleet.config, token=file.read_text().split()[0])


@dataclass
class Load:
    """Callers that send one request after the other. least: requests to send, however early the rollout ends."""

    client: Client
    least: int
    sent: int = 0
    errors: list[str] = field(default_factory=list)
    other_text: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    known: dict[str, str] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prompts(self) -> list[str]:
        return [f"def number_{number}(values):\n    " + "# keep the order\n    " * 12 for number in range(8)]

    def learn(self) -> None:
        """The right answers, before anything is changed."""
        self.known = {prompt: self.answer(prompt).text for prompt in self.prompts()}

    def answer(self, prompt: str) -> Completion:
        return self.client.generate(MODEL, prompt, max_tokens=32, ignore_eos=True, timeout=120)

    def call(self, first: int) -> None:
        prompts = self.prompts()
        while not self.ending.is_set() or self.sent < self.least:
            with self.lock:
                self.sent += 1
                prompt = prompts[(self.sent + first) % len(prompts)]
            try:
                answer = self.answer(prompt)
            except DisaggError as error:
                with self.lock:
                    self.errors.append(f"{error.code()}: {error.message}")
                continue
            with self.lock:
                self.methods[answer.metrics.method] += 1
                self.other_text += answer.text != self.known[prompt]


@contextmanager
def calling(load: Load, callers: int) -> Iterator[None]:
    """Within, the callers have requests on the fleet."""
    with load.client:
        load.learn()
        threads = [threading.Thread(target=load.call, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            load.ending.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
