"""Simulated: a DGX Spark sends Llama-3.1-8B's KV to an M3 Ultra through the real servers, wire protocol and client.

    python benchmarks/simulated_pair.py                      loopback, unshaped
    sudo python benchmarks/simulated_pair.py --gbit 10       over a link of 10 Gb/s (two network namespaces, tc tbf)
    sudo python benchmarks/simulated_pair.py --share 0.6     over a link on which the transfer takes 0.6 x the prefill

No model runs: prefill and decode wait for the times that the roofline predicts, and the KV is random bytes of full
size. Everything between is measured. Printed per round and as medians, in seconds:

    total       sent -> last token
    ideal       predicted prefill + predicted generation, each on its best machine
    transfer    KV bytes / payload rate of the link (unshaped: hidden + exposed, as the sender measured them)
    hidden      sending while prefill computed
    exposed     prefill waited for the link, and end of prefill -> the last KV byte acknowledged

It ends with 1 if a figure contradicts another, or the link: see `contradictions`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from disagg import Client
from disagg.config import load
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll
from disagg.inference.metrics import Metrics
from disagg.planning import capacity
from disagg.planning.capacity import Setup
from disagg.planning.devices import device
from disagg.planning.shapes import shape
from disagg.planning.times import Link
from disagg.token import TOKEN_FILE_VARIABLE

START_S = 60.0
STOP_S = 20.0
BURST_S = 0.002  # of traffic that tbf passes at once; a smaller burst than half a timer tick at 250 Hz reduces the rate
UNSEEN = 0.97
"""Of a transfer's time over a link slower than prefill: the rest passes in bursts and in the sockets' buffers. A faster
link empties the buffers between two layers: of 8 MB each the sender has then seen half or less, and hidden is that."""
PORTS = (18101, 18102, 18103)
HOSTS = """
[fleet]
name = "simulated-pair"
[models.model]
context = {context}
sources = {{simulated = "shape:{shape}"}}
[hosts.prefill]
address = "{addresses[0]}"
roles = ["prefill"]
model = "model"
port = {ports[0]}
connector = "local"
service = "process"
hardware = "{prefill}"
engine = {{name = "simulated", dtype = "{dtype}"}}
[hosts.decode]
address = "{addresses[1]}"
roles = ["decode"]
model = "model"
port = {ports[1]}
kv_port = {ports[2]}
connector = "local"
service = "process"
hardware = "{decode}"
engine = {{name = "simulated", dtype = "{dtype}"}}
"""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Two network namespaces and a link between them. Index 0 is the prefill host's."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.213.0.1", "10.213.0.2")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", default="llama-3.1-8b")
    options.add_argument("--dtype", default="float16")
    options.add_argument("--prefill", default="dgx-spark")
    options.add_argument("--decode", default="m3-ultra")
    options.add_argument("--prompt-tokens", type=int, default=8192)
    options.add_argument("--output-tokens", type=int, default=32)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--gbit", type=float, help="shape the link to this many Gb/s")
    options.add_argument("--share", type=float, help="shape the link so that the transfer takes this share of prefill")
    options.add_argument("--json", action="store_true")
    options.add_argument("--drive", type=Path, help=argparse.SUPPRESS)  # inside a namespace: the client's part
    args = options.parse_args()
    if args.drive:
        print(json.dumps([asdict(metrics) for metrics in drive(args.drive, args)]))
        return
    setup = Setup(shape(args.shape), device(args.prefill), device(args.decode), Link(args.gbit or 100.0), args.dtype)
    if (gbit := args.gbit if args.share is None else shared_link(setup, args)) is not None:
        setup = replace(setup, link=Link(gbit))
    with tempfile.TemporaryDirectory(prefix="disagg-simulated-pair-") as folder, ExitStack() as stack:
        link = stack.enter_context(shaped_link(gbit)) if gbit else None
        hosts = write_hosts(Path(folder), args, link)
        stack.enter_context(servers(hosts, link))
        rounds = measured(hosts, link)
    report(rounds, setup, args, gbit)


def shared_link(setup: Setup, args: argparse.Namespace) -> float:
    """The Gb/s on which the transfer takes `--share` of the prefill."""
    whole = capacity.disaggregated(setup, args.prompt_tokens, args.output_tokens)
    one = Link(1.0).bytes_per_s
    return float(whole.kv_bytes / (args.share * whole.prefill_s) / one)


def report(rounds: Sequence[dict[str, Any]], setup: Setup, args: argparse.Namespace, gbit: float | None) -> None:
    forecast = capacity.disaggregated(setup, args.prompt_tokens, args.output_tokens)
    ideal = forecast.prefill_s + forecast.decode_s
    rate = Link(gbit).bytes_per_s if gbit else None
    rows = [
        {
            "total": m["total_time"],
            "total_over_ideal": m["total_time"] / ideal,
            "prefill": m["prefill_time"],
            "prefill_over_predicted": m["prefill_time"] / forecast.prefill_s,
            "transfer": m["kv_bytes"] / rate if rate else m["hidden_transfer"] + m["exposed_transfer"],
            "hidden": m["hidden_transfer"],
            "exposed": m["exposed_transfer"],
            "ingest": m["ttft_parts"]["ingest"],
            "rest": sum(m["ttft_parts"][part] for part in ("network", "tokenise", "queue")),
            "decode": m["decode_time"],
        }
        for m in rounds
    ]
    for row in rows:
        row["exposed_over_transfer"] = row["exposed"] / row["transfer"]
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    network = f"{gbit:.2f} Gb/s (tc tbf)" if gbit else "loopback, unshaped"
    what = f"{setup.shape.name} {setup.dtype}, {args.prompt_tokens} + {args.output_tokens} tokens, {network}"
    wrong = [f"round {n + 1}: {text}" for n, m in enumerate(rounds) for text in contradictions(m, rate)]
    result = {
        "simulated": True,
        "what": what,
        "ideal": ideal,
        "predicted_exposed": forecast.exposed_s,
        "kv_bytes": rounds[0]["kv_bytes"],
        "rounds": rows,
        "contradictions": wrong,
    }
    if args.json:
        print(json.dumps({**result, "median": medians}, indent=2))
        sys.exit(1 if wrong else 0)
    print(f"simulated: {setup.prefill_device.title} -> {setup.decode_device.title}, {what}")
    predicted = f"ideal {ideal:.3f} s, predicted exposed {forecast.exposed_s:.3f} s"
    print(f"simulated: KV {rounds[0]['kv_bytes'] / 1e6:.0f} MB, {predicted}, load {os.getloadavg()[0]:.1f}")
    for name, row in [*((str(index + 1), row) for index, row in enumerate(rows)), ("median", medians)]:
        print(f"simulated: {name:>6}  " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    sys.exit("\n".join(wrong) if wrong else 0)


def contradictions(metrics: dict[str, Any], rate: float | None) -> list[str]:
    """What cannot be true of a request's figures. rate: payload bytes per second of the link."""
    hidden, exposed = metrics["hidden_transfer"], metrics["exposed_transfer"]
    parts, least = sum(metrics["ttft_parts"].values()), metrics["kv_bytes"] / rate if rate else 0.0
    found = []
    if hidden > metrics["prefill_time"]:
        found.append(f"{hidden:.3f} s of sending are hidden in {metrics['prefill_time']:.3f} s of prefill")
    if least > metrics["prefill_time"] and hidden + exposed < UNSEEN * least:
        found.append(f"{hidden:.3f} s hidden and {exposed:.3f} s exposed are less than the {least:.3f} s of the link")
    if abs(parts - metrics["ttft"]) > 1e-6 or min(metrics["ttft_parts"].values()) < 0:
        found.append(f"the parts of TTFT are {parts:.3f} s of {metrics['ttft']:.3f}")
    return found


# The client's part


def measured(hosts: Path, link: Namespaces | None) -> list[dict[str, Any]]:
    """Run the client, in the decode host's namespace if there is one. Returns its metrics for each round."""
    options = [argument for argument in sys.argv[1:] if argument != "--json"]
    argv = [*inside(link, 1), sys.executable, __file__, *options, "--drive", str(hosts)]
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, env=environment(hosts)).stdout
    rounds: list[dict[str, Any]] = json.loads(output)
    return rounds


def drive(hosts: Path, args: argparse.Namespace) -> list[Metrics]:
    fleet = load(hosts)
    wait_healthy(hosts)
    prompt = list(range(args.prompt_tokens))
    with Client(fleet) as client:
        client.generate("model", tokens=prompt[:64], max_tokens=2)  # what only a first request costs
        return [
            client.generate("model", tokens=prompt, max_tokens=args.output_tokens, cache_salt=f"{k}").metrics
            for k in range(args.rounds)
        ]


def wait_healthy(hosts: Path) -> None:
    fleet, deadline = load(hosts), time.monotonic() + START_S
    state = State.of(fleet, hosts.parent)
    token = (hosts.parent / "token").read_text()
    while True:
        statuses = poll(fleet, token, state)
        if all(status.ok for status in statuses):
            return
        if time.monotonic() > deadline:
            sys.exit("\n".join(f"simulated: {status.host}: {status.state} {status.why}" for status in statuses))
        time.sleep(0.1)


# Servers and link


@contextmanager
def servers(hosts: Path, link: Namespaces | None) -> Iterator[None]:
    """Start both servers, each in its namespace, and stop them on exit."""
    running = []
    try:
        for index, name in enumerate(("prefill", "decode")):
            argv = [*inside(link, index), sys.executable, "-m", "disagg.servers", "--config", str(hosts)]
            with (hosts.parent / f"{name}.log").open("wb") as log:
                running.append(
                    subprocess.Popen([*argv, "--host", name], stdout=log, stderr=log, env=environment(hosts))
                )
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def prepare_token(folder: Path) -> None:
    """Make the fleet's token, where `environment` says that it is."""
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(16))


def write_hosts(folder: Path, args: argparse.Namespace, link: Namespaces | None) -> Path:
    prepare_token(folder)
    path = folder / "hosts.toml"
    path.write_text(
        HOSTS.format(
            context=args.prompt_tokens + args.output_tokens,
            shape=args.shape,
            dtype=args.dtype,
            prefill=args.prefill,
            decode=args.decode,
            addresses=link.addresses if link else ("127.0.0.1", "127.0.0.1"),
            ports=PORTS,
        )
    )
    return path


def environment(hosts: Path) -> dict[str, str]:
    return {**os.environ, TOKEN_FILE_VARIABLE: str(hosts.parent / "token")}


def inside(link: Namespaces | None, index: int) -> list[str]:
    return ["ip", "netns", "exec", link.names[index]] if link else []


@contextmanager
def shaped_link(gbit: float) -> Iterator[Namespaces]:
    """Two namespaces with unique names, connected by a veth pair with `gbit` Gb/s each way. Needs root."""
    tag = f"{os.getpid()}"
    link = Namespaces((f"disagg-p{tag}", f"disagg-d{tag}"))
    ends = (f"dsg-p{tag}", f"dsg-d{tag}")
    with ExitStack() as stack:
        for name in link.names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip(
            "link",
            "add",
            ends[0],
            "netns",
            link.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            link.names[1],
        )
        for name, end, address in zip(link.names, ends, link.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
            burst = int(gbit * 1e9 / 8 * BURST_S) + (1 << 17)
            tbf = ("tbf", "rate", f"{gbit:.6f}gbit", "burst", str(burst), "latency", "20ms")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", end, "root", *tbf], check=True)
        yield link


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    main()
