"""Measure every figure that disagg promises, on this machine and in one run, and print one table.

    python -m benchmarks [--rounds 5] [--quick] [--markdown FILE]

Ratios are of figures from the same run. It needs at least two idle cores; the load is printed, since a busy machine
makes every row worse. Rows that need root (a shaped link between network namespaces) or a package that is not installed
are skipped by name. A part that fails is a row of its own, and the exit code is 1. `simulated`: no model runs, the
servers wait for predicted times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.medians import Verdict
from disagg.api.handoff import HandoffFigures
from disagg.extras import install

SIMULATED = Path(__file__).with_name("simulated_pair.py")
_STYLES: Final = {"met": "green", "not met": "red", "undecided": "yellow", "skipped": "dim", "failed": "red"}
_TABLE: Final = re.compile(r"^\d+ cores, load .*\n\n(?:\|.*\n)+", re.M)
"""What `markdown` writes."""
_MARKED: Final = {"not met": "**not met**", "failed": "**failed**"}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, its target, and whether it is met."""

    figure: str
    target: str
    measured: str
    verdict: Verdict | Literal["stated", "skipped", "failed"]


class ProgramFailed(Exception):
    """A program of this benchmark printed no figures; the message is its exit code and the end of its stderr."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--quick", action="store_true", help="a quarter of the bytes; not for figures to quote")
    options.add_argument("--markdown", type=Path, help="also write the table there, in the place of one that is there")
    args = options.parse_args()
    rows: list[Row] = []
    console, load = Console(), os.getloadavg()[0]
    for part in PARTS:
        console.print(f"{part.__name__} …", style="dim")
        try:
            rows += part(args.rounds, args.quick)
        except ProgramFailed as error:
            console.print(str(error), style="red", markup=False)
            rows.append(Row(part.__name__, "", str(error).partition("\n")[0], "failed"))
    heading = f"{os.cpu_count()} cores, load {load:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end"
    console.print(table(rows, heading))
    if args.markdown:
        before = args.markdown.read_text() if args.markdown.exists() else ""
        args.markdown.write_text(in_place(before, markdown(rows, heading)))
    if any(row.verdict == "failed" for row in rows):
        sys.exit(1)


def handoff(rounds: int, quick: bool) -> Iterator[Row]:
    """`disagg bench handoff`: compared with a bare socket and base64 in JSON."""
    tokens = "2048" if quick else "8192"
    argv = [sys.executable, "-m", "disagg", "bench", "handoff", "--json", "--rounds", str(rounds), "--tokens", tokens]
    figures = HandoffFigures.from_json(run(argv))
    size = f"{figures.bytes / 1e6:.0f} MB"
    rates = f"{figures.handoff_gb_s:.2f} / {figures.raw_socket_gb_s:.2f} GB/s"
    yield at_least(f"hand-off to ready MLX caches, {size} / bare socket", figures.ratio_to_raw, 0.80, rates)
    json_rate = f"{figures.base64_json_gb_s:.3f} GB/s"
    yield at_least("the same / base64 in JSON over HTTP", figures.ratio_to_base64_json, 40, json_rate)


def peers(rounds: int, quick: bool) -> Iterator[Row]:
    """Compared with other transports."""
    size = "201" if quick else "805"
    got = run([sys.executable, "-m", "benchmarks.peers.transport", "--rounds", str(rounds), "--mb", size])
    targets = {"mooncake": ("Mooncake Transfer Engine over TCP", 1.2), "nixl": ("NIXL, UCX over TCP", 4.0)}
    for name, (title, target) in targets.items():
        if name not in got["peers"]:
            yield skipped(
                f"hand-off / {title}", f"at least {target}", got["skipped"].get(name, {}).get("install", "failed")
            )
            continue
        ours, ways = got["peers"]["disagg"]["gb_s"], got["peers"][name]["ways"]
        rates = ", ".join(f"{way} {figures['gb_s']:.2f}" for way, figures in ways.items())
        yield at_least(
            f"hand-off / {title}, its best way", ours / got["peers"][name]["gb_s"], target, f"{ours:.2f} / {rates} GB/s"
        )


def prefill(rounds: int, quick: bool) -> Iterator[Row]:
    """Compared with a bare forward pass, and while KV is sent."""
    got = run([sys.executable, "-m", "benchmarks.prefill", "--rounds", str(rounds)])
    yield at_least("prefill tokens/s / bare transformers forward, same chunks", got["engine_over_bare"], 0.97)
    sent = f"while sending {got['sent_gb_s']:.2f} GB/s"
    yield at_most("slowdown of prefill compute while sending", got["slowdown_while_sending"], 0.03, sent)
    yield at_most("the same in CPU time of the computing thread", got["slowdown_of_its_thread"], 0.03, sent)


def vllm(rounds: int, quick: bool) -> Iterator[Row]:
    """vLLM through our server compared with vLLM alone, and with our transformers engine."""
    figure, python = (
        "prefill tokens/s through a server with vLLM / vLLM without connector",
        Path(".venv-vllm/bin/python"),
    )
    if not python.exists():
        yield skipped(figure, "at least 0.97", "make .venv-vllm/.ready")
        return
    got = run([sys.executable, "-m", "benchmarks.vllm_prefill", "--rounds", str(rounds), "--python", str(python)])
    rate = f"{got['tokens_per_s']['server']:.0f} tokens/s"
    yield at_least(figure, got["server_over_bare"], 0.97, rate)
    yield at_least("the same / our transformers engine", got["vllm_over_transformers"], 1.0, rate)


def decode(rounds: int, quick: bool) -> Iterator[Row]:
    """Compared with mlx_lm.server."""
    got = run([sys.executable, "-m", "benchmarks.peers.mlx_server", "--rounds", str(rounds)])
    if got.get("skipped"):
        yield skipped("decode tokens/s / mlx_lm.server", "at least 1.0", install("decode"))
        return
    for together, ratio in got["steady_ratio"].items():
        rate = got["concurrency"][together]["disagg"]["steady_tok_s"]
        yield at_least(f"decode tokens/s / mlx_lm.server, concurrency {together}", ratio, 1.0, f"{rate:.0f} tokens/s")


def per_token(rounds: int, quick: bool) -> Iterator[Row]:
    """CPU time of a token of a streamed answer, beside the model's step."""
    argv = [sys.executable, "-m", "benchmarks.per_token", "--json", "--models", "simulated", "--rounds", str(rounds)]
    got = run([*argv, *(["--streams", "1", "32"] if quick else [])])
    for row in got["us_per_token"]:
        client, loop, engine = (row[part]["median"] for part in ("client", "loop", "engine"))
        parts = f"client {client:.0f}, server's loop {loop:.0f}, engine's thread {engine:.0f}"
        figure, streams = "simulated: us of CPU per token, {} at a time: client", row["streams"]
        if streams == 1:
            yield at_most(f"{figure.format(1)} + loop + engine", client + loop + engine, 300, parts)
        elif streams == 32:
            yield at_most(f"{figure.format(32)} + loop", client + loop, 80, parts)
        else:
            yield Row(f"{figure.format(streams)} + loop", "", formatted(client + loop, parts), "stated")


def ttft(rounds: int, quick: bool) -> Iterator[Row]:
    """TTFT, less the models' own work."""
    got = run([sys.executable, "-m", "benchmarks.ttft"])
    for length, row in got["prompt_tokens"].items():
        yield at_most(f"ms of TTFT beyond prefill, exposed transfer, one step; {length} tokens", row["beyond_ms"], 15.0)


def gateway(rounds: int, quick: bool) -> Iterator[Row]:
    """Compared with disagg's own client."""
    got = run([sys.executable, "-m", "benchmarks.gateway", "--pairs", "10" if quick else "60"])
    ttft = f"{got['gateway']['ttft_ms']:.1f} / {got['client']['ttft_ms']:.1f} ms"
    tpot = f"{got['gateway']['tpot_ms']:.2f} / {got['client']['tpot_ms']:.2f} ms"
    for name, key, target, times in (
        ("ms of TTFT", "added_ttft_ms", 5.0, ttft),
        ("share of TPOT", "added_tpot", 0.03, tpot),
    ):
        added = got[key]
        yield at_most(f"simulated: {name} that the gateway adds, p50", added["median"], target, times, added["is"])


def shaped(rounds: int, quick: bool) -> Iterator[Row]:
    """Over a link of a given rate; needs root."""
    overlap = "simulated: exposed / whole transfer, link at 0.6 x prefill, 8192 tokens, 32 layers"
    pair = "simulated: DGX Spark -> M3 Ultra, Llama-3.1-8B fp16, 8192 tokens, 10 GbE: total / best halves"
    slower = "simulated: exposed transfer / predicted, link at 2.2 x prefill, 16000 tokens"
    if os.geteuid() != 0:
        yield skipped(overlap, "at most 0.06", "run it as root")
        yield skipped(slower, "at most 1.1", "run it as root")
        yield skipped(pair, "at most 1.05", "run it as root")
        return
    argv = [sys.executable, str(SIMULATED), "--json", "--rounds", str(rounds)]
    yield at_most(overlap, run([*argv, "--share", "0.6"])["median"]["exposed_over_transfer"], 0.06)
    got = run([*argv, "--share", "2.2", "--prompt-tokens", "16000"])
    if wrong := got["contradictions"]:
        raise ProgramFailed("simulated_pair.py: figures contradict each other\n" + "\n".join(wrong))
    ratio = got["median"]["exposed"] / got["predicted_exposed"]
    yield at_most(slower, ratio, 1.1, f"{got['median']['exposed']:.2f} s of {got['predicted_exposed']:.2f}")
    got = run([*argv, "--gbit", "10"])
    yield at_most(
        pair, got["median"]["total_over_ideal"], 1.05, f"{got['median']['total']:.2f} s of {got['ideal']:.2f}"
    )


def split(rounds: int, quick: bool) -> Iterator[Row]:
    """A prompt that two processes compute, compared with what each of them computes."""
    argv = [sys.executable, "-m", "benchmarks.split", "--rounds", str(rounds), "--tokens", "1000" if quick else "4000"]
    got = run(argv)
    speeds = ", ".join(f"{way} {speed:.0f}" for way, speed in got["mlx"]["tokens_per_s"].items())
    figure = "split of a prompt, MLX in front of MLX: tokens/s / both alone, added"
    yield at_least(figure, got["mlx"]["split_over_sum"], 0.85, f"{speeds} tokens/s")
    for layers, row in got["torch"].items():
        times = f"{row['wall_s']:.2f} s; head {row['head_s']:.2f}, tail {row['tail_s']:.2f}"
        figure = f"split after {layers} of 32 layers, torch in front of MLX: time / slower end's own"
        yield at_most(figure, row["over_slower_end"], 1.12, times)


def split_simulated(rounds: int, quick: bool) -> Iterator[Row]:
    """The same at full size, over a link of a given rate; needs root."""
    figure = "simulated: DGX Spark + M3 Ultra, Llama-3.1-8B, 8192 tokens split, 10 GbE: prefill / ideal at its chunks"
    if os.geteuid() != 0:
        yield skipped(figure, "at most 1.08", "run it as root")
        return
    argv = [sys.executable, "-m", "benchmarks.split_simulated", "--json", "--rounds", str(rounds)]
    (got,) = run([*argv, "--pair", "llama-3.1-8b", "--gbit", "10", "--tokens", "8192"])["rows"]
    layers = f"{got['split']:.2f} s of {got['ideal']:.2f}, {got['layers']} of 32 layers; hand-off {got['hand-off']:.2f}"
    yield at_most(figure, got["split_over_ideal"], 1.08, layers)


PARTS: Sequence[Callable[[int, bool], Iterator[Row]]] = (
    handoff,
    shaped,
    split_simulated,
    split,
    prefill,
    vllm,
    ttft,
    decode,
    per_token,
    gateway,
    peers,
)


def at_least(figure: str, value: float, target: float, detail: str = "") -> Row:
    return Row(figure, f"at least {target:g}", formatted(value, detail), "met" if value >= target else "not met")


def at_most(figure: str, value: float, target: float, detail: str = "", verdict: Verdict | None = None) -> Row:
    """verdict: of a program that knows the interval of its figure."""
    found: Verdict = verdict or ("met" if value <= target else "not met")
    return Row(figure, f"at most {target:g}", formatted(value, detail), found)


def skipped(figure: str, target: str, how: str) -> Row:
    return Row(figure, target, f"skipped: {how}", "skipped")


def formatted(value: float, detail: str) -> str:
    return f"{value:.3g} ({detail})" if detail else f"{value:.3g}"


def run(argv: Sequence[str]) -> dict[str, Any]:
    """The JSON that a program prints on stdout. Raises ProgramFailed if there is none."""
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if not done.stdout.strip():
        raise ProgramFailed(f"{' '.join(argv[1:])}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(rows: Sequence[Row], heading: str) -> Table:
    shown = Table(title=heading)
    for name in ("figure", "target", "measured"):
        shown.add_column(name, overflow="fold")
    for row in rows:
        style = _STYLES.get(row.verdict, "")
        shown.add_row(Text(row.figure), Text(row.target), Text(row.measured, style))
    return shown


def markdown(rows: Sequence[Row], heading: str) -> str:
    lines = [f"{heading}.", "", "| figure | target | measured | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row.figure} | {row.target} | {row.measured} | {_MARKED.get(row.verdict, row.verdict)} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def in_place(text: str, written: str) -> str:
    """The text with this table instead of the one that it has; the table alone if it has none."""
    old = _TABLE.search(text)
    return written if old is None else f"{text[: old.start()]}{written}{text[old.end() :]}"


if __name__ == "__main__":
    main()
