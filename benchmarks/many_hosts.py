"""Twenty hosts, five of them unreachable: how long deploy and status take, and what they report.

    python -m benchmarks.many_hosts [--hosts 20] [--unreachable 5] [--rounds 3]

The hosts are namespaces of this machine with an sshd, an account and a home each, half of them like a DGX Spark, half
like a Mac as far as a shell can see; that needs root. They get disagg and the demo models; their environments are
made at once, as those of tests. Their servers are not started, so that status asks every machine over SSH, too. Times
are those of whole `disagg` commands, with the start of the interpreter. Prints one JSON object, seconds as medians.
`cut`: the link is down and the kernel reports no route. `silent`: packets vanish, as behind a router.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.integration.deployed import ROOT, Operator, operator
from tests.testbed import bed as testbed
from tests.testbed.bed import HOSTS_TOML, Bed

PATIENCE_S = 1800.0
_PREFILL = """
[hosts.spark-{number}]
address = "169.254.150.{octet}"
roles = ["prefill"]
model = "{model}"
port = 8000
connector = "ssh"
service = "systemd"

[hosts.spark-{number}.engine]
name = "transformers"
dtype = "bfloat16"
device = "cuda"
"""
_DECODE = """
[hosts.mac-{number}]
address = "169.254.150.{octet}"
roles = ["decode"]
model = "{model}"
port = 8001
kv_port = 9001
connector = "ssh"
service = "launchd"

[hosts.mac-{number}.engine]
name = "mlx"
dtype = "bfloat16"
device = "gpu"
max_kv_bytes = 1_073_741_824
"""
_MODELS = ("qwen3-coder:30b", "gpt-oss:120b")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", type=int, default=20)
    options.add_argument("--unreachable", type=int, default=5)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-hosts-") as name:
        folder = Path(name)
        with testbed.running(folder, hosts_toml(folder, args.hosts)) as bed:
            if not bed.real:
                raise SystemExit("this needs network namespaces: run it as root")
            (folder / "operator").mkdir()
            with bed.entered():
                print(json.dumps(measure(bed, operator(bed, folder / "operator"), args), indent=2))


def hosts_toml(folder: Path, hosts: int) -> Path:
    """The models of the repository's hosts.toml on so many hosts, in turn of both kinds and both models."""
    text = HOSTS_TOML.read_text(encoding="utf-8")
    parts = [text[: text.index("\n[hosts.")]]
    for number in range(hosts):
        block = (_PREFILL, _DECODE)[number % 2]
        parts.append(block.format(number=number // 2 + 1, octet=number + 11, model=_MODELS[number // 2 % 2]))
    path = folder / "many.toml"
    path.write_text("".join(parts), encoding="utf-8")
    return path


def measure(bed: Bed, fleet: Operator, args: argparse.Namespace) -> dict[str, Any]:
    rounds: int = args.rounds
    found = {"hosts": len(bed.hosts), "cores": os.cpu_count(), "first deploy": timed(fleet, 1, "deploy", "--yes")}
    found |= both(fleet, rounds, "all reachable", codes=(0, 3))
    found["second deploy, one host at a time"] = timed(fleet, 1, "deploy", "--yes", "--parallel", "1")
    for how in ("cut", "silent"):
        with unreachable(bed, args.unreachable, silent=how == "silent"):
            found |= both(fleet, rounds, f"{args.unreachable} {how}", codes=(4, 4))
    return found


def both(fleet: Operator, rounds: int, what: str, codes: tuple[int, int]) -> dict[str, Any]:
    return {
        f"second deploy, {what}": timed(fleet, rounds, "deploy", "--yes", code=codes[0]),
        f"status, {what}": timed(fleet, rounds, "status", code=codes[1]),
    }


@contextmanager
def unreachable(bed: Bed, count: int, *, silent: bool) -> Iterator[None]:
    """Within, every fourth host has no link."""
    with ExitStack() as stack:
        for name in list(bed.hosts)[: count * 4 : 4]:
            stack.enter_context(bed.cut(name, silent=silent))
        yield


def timed(fleet: Operator, rounds: int, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Seconds, and how many hosts ended how."""
    seconds, rows = [], []
    for _ in range(rounds):
        began = time.monotonic()
        done = run(fleet, *arguments, "--json")
        seconds.append(time.monotonic() - began)
        sys.stderr.write(f"{arguments}: {seconds[-1]:.1f} s\n")
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        rows = json.loads(done.stdout)["hosts"]
    states = Counter(row.get("result") or row.get("outcome") or row.get("state") for row in rows)
    return {"s": round(statistics.median(seconds), 2), "hosts": dict(states)}


def run(fleet: Operator, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a person does."""
    return subprocess.run(
        fleet.argv(*arguments),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S * 2,
        env=fleet.environment,
        cwd=ROOT,
        check=False,
    )


if __name__ == "__main__":
    main()
