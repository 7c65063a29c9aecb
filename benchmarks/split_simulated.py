"""Simulated at full size: a prompt that both machines compute, through the real servers, wire protocol and client, over
a link of a given rate; compared with the hand-off, the decode machine alone, and what would be ideal.

    sudo python -m benchmarks.split_simulated                        all pairs, 2.5 and 10 Gb/s, 2K to 64K tokens
    sudo python -m benchmarks.split_simulated --pair qwen3-coder-30b --gbit 10 --tokens 8192
    python -m benchmarks.split_simulated --beside                    sixteen running answers, over loopback
    python -m benchmarks.split_simulated --plan                      what is planned, and predicted to take; no server

No model runs: both ends wait for the times that the device model predicts, and send bytes of full size. Seconds until
the KV of all layers is there, the answer's first step left out; medians.

    split        as the decode host chooses: k layers on the prefill host, or all, or none
    ideal        the quickest division of the layers over this link, in the same chunks
    both         the same if layers could be divided anywhere, and sending took no time
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.simulated_pair import (
    Namespaces,
    environment,
    inside,
    prepare_token,
    servers,
    shaped_link,
    wait_healthy,
)
from disagg import Client
from disagg.api.layout import SplitLayout, split_chunk
from disagg.api.names import KV_CHUNKS
from disagg.api.requests import PrefillOffer
from disagg.config import load
from disagg.planning.devices import device
from disagg.planning.sizing import read_size
from disagg.planning.split import SplitPair, best_split, ideal_s, split
from disagg.planning.times import Link, prefill
from disagg.servers.decode.spans import Here, Rest, Spans, plan

LENGTHS: Final = (2048, 8192, 32768, 65536)
GBITS: Final = (2.5, 10.0)
LOCAL_UP_TO: Final = 8192
"""The decode machine alone takes minutes for longer prompts."""
WARM_UP: Final = (1024, 4096, 4096, 1024)
UNCOUNTED: Final = 2
"""Rounds of each length that are not counted: memory of its size is touched for the first time, which takes a virtual
machine over a second per gigabyte, and speeds of prompts so long are measured."""
KV_BYTES: Final = 128 << 30
"""Of the decode host. Finished prompts count as held: less than this, and the memory that KV comes into is not kept."""
WHOLE_CHUNK: Final = 2048
"""Tokens of a chunk of a prompt that one machine computes."""
DTYPE: Final = "bfloat16"
HOSTS = """
[fleet]
name = "simulated-split"
[models.model]
context = 70000
sources = {{simulated = "{source}"}}
[hosts.prefill]
address = "{addresses[0]}"
roles = ["prefill"]
model = "model"
port = 18111
connector = "local"
service = "process"
hardware = "{prefill}"
engine = {{name = "simulated", dtype = "{dtype}"}}
[hosts.decode]
address = "{addresses[1]}"
roles = ["decode"]
model = "model"
port = 18112
kv_port = 18113
connector = "local"
service = "process"
hardware = "{decode}"
engine = {{name = "simulated", dtype = "{dtype}", max_kv_bytes = {kv_bytes}, max_batch = 32{split}}}
"""
# A dense model that a DGX Spark reads at 865 and an M5 Max at 557 tokens/s, at 32K tokens.
READ_AT_865: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 46,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 29440,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "torch_dtype": DTYPE,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A model on two machines. source: of the model; "" for READ_AT_865."""

    source: str
    prefill: str
    decode: str


PAIRS: Final = {
    "llama-3.1-8b": Pair("shape:llama-3.1-8b", "dgx-spark", "m3-ultra"),
    "qwen3-coder-30b": Pair("shape:qwen3-coder-30b", "dgx-spark", "m3-ultra"),
    "gpt-oss-120b": Pair("shape:gpt-oss-120b", "dgx-spark", "m3-ultra"),
    "865-and-557": Pair("", "dgx-spark", "m5-max"),
}
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "split": {"split": "auto"},
    "hand-off": {"split": "off", "local_prefill": False},
    "decode alone": {"alone": "decode"},
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pair", nargs="+", choices=PAIRS, default=list(PAIRS))
    options.add_argument("--tokens", nargs="+", type=int, default=LENGTHS)
    options.add_argument("--gbit", nargs="+", type=float, default=GBITS)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="what is measured beside the split")
    options.add_argument("--json", action="store_true")
    options.add_argument("--beside", action="store_true", help="what a prompt costs sixteen running answers")
    options.add_argument("--plan", action="store_true", help="a table of what is planned, as Markdown")
    options.add_argument("--drive", type=Path, help=argparse.SUPPRESS)  # inside a namespace: the client's part
    args = options.parse_args()
    if args.drive:
        print(json.dumps(drive(args.drive, args.tokens, args.rounds, {"split", *args.way})))
        return
    if args.plan:
        print("\n".join(plans(args)))
        return
    if args.beside:
        print(json.dumps(beside(args.rounds), indent=2))
        return
    rows = [row for gbit in args.gbit for name in args.pair for row in measured(name, gbit, args)]
    if args.json:
        print(json.dumps({"simulated": True, "load": os.getloadavg()[0], "rows": rows}, indent=2))
    else:
        for row in rows:
            print("simulated: " + "  ".join(f"{name} {_shown(value)}" for name, value in row.items()))


def measured(name: str, gbit: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One pair over one link: a row per prompt length."""
    with tempfile.TemporaryDirectory(prefix="disagg-split-") as folder, ExitStack() as stack:
        link = stack.enter_context(shaped_link(gbit))
        hosts = write_hosts(Path(folder), PAIRS[name], link)
        stack.enter_context(servers(hosts, link))
        numbers = [str(number) for number in args.tokens]
        argv = [*inside(link, 1), sys.executable, "-m", "benchmarks.split_simulated", "--drive", str(hosts)]
        argv += ["--rounds", str(args.rounds), "--tokens", *numbers, "--way", *args.way]
        output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, env=environment(hosts)).stdout
        source = source_of(PAIRS[name], Path(folder))
        for tokens, ways in json.loads(output).items():
            yield row(name, source, gbit, int(tokens), ways)


def row(
    name: str, source: str, gbit: float, tokens: int, ways: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """ways: the metrics of each way's rounds."""
    chunk = split_chunk(tokens)
    machines = device(PAIRS[name].prefill), device(PAIRS[name].decode)
    pair = SplitPair(read_size(source), *machines, Link(gbit), DTYPE, chunk)
    medians = {way: statistics.median(until_all_layers(one) for one in rounds) for way, rounds in ways.items()}
    others = [value for way, value in medians.items() if way != "split"]
    ideal, both = best_split(pair, tokens - 1), ideal_s(pair, tokens - 1)
    return {
        "pair": name,
        "gbit": gbit,
        "tokens": tokens,
        "chunk": chunk,
        "layers": sorted({_layers(one, pair.shape.layers) for one in ways["split"]}),
        **medians,
        "ideal": ideal.seconds,
        "ideal_layers": ideal.layers,
        "both": both,
        "split_over_ideal": medians["split"] / ideal.seconds,
        "split_over_both": medians["split"] / both,
        **({"split_over_better": medians["split"] / min(others)} if others else {}),
    }


def until_all_layers(metrics: Mapping[str, Any]) -> float:
    """Seconds from the request to the KV of all layers of its prompt."""
    return float(metrics["ttft"] - metrics["ttft_parts"]["first_step"] - metrics["ttft_parts"]["ingest"])


def _layers(metrics: Mapping[str, Any], every: int) -> int:
    if metrics["layers"] is not None:
        return int(metrics["layers"])
    return every if metrics["method"] == "disaggregated" else 0


def drive(
    hosts: Path, lengths: Sequence[int], rounds: int, wanted: Collection[str]
) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """The metrics of each round, by prompt length and way. Before them each end's speed and the link are measured, as
    by earlier requests."""
    fleet = load(hosts)
    wait_healthy(hosts)
    with Client(fleet) as client:

        def ask(tokens: int, way: str, salt: str) -> dict[str, Any]:
            prompt = [(7 * place + tokens) % 30000 for place in range(tokens)]
            options = {**WAYS[way], "max_tokens": 2, "cache_salt": f"{way}-{salt}", "timeout": 1200.0}
            return asdict(client.generate("model", tokens=prompt, **options).metrics)

        for number, tokens in enumerate(WARM_UP):
            for way in WAYS:
                ask(tokens, way, f"warm-{number}")
        found: dict[int, dict[str, list[dict[str, Any]]]] = {}
        for tokens in lengths:
            ways = [way for way in WAYS if way in wanted and (way != "decode alone" or tokens <= LOCAL_UP_TO)]
            for number in range(UNCOUNTED):
                for way in ways:
                    if way != "decode alone":
                        ask(tokens, way, f"first-{number}")
            found[tokens] = {way: [] for way in ways}
            for number in range(rounds):
                for way in ways:
                    found[tokens][way].append(ask(tokens, way, str(number)))
    return found


def beside(rounds: int) -> dict[str, Any]:
    """8,000 tokens beside sixteen answers: time per token of these, for a hand-off and for a split that is asked for,
    24 of 32 layers."""
    with tempfile.TemporaryDirectory(prefix="disagg-split-") as folder:
        hosts = write_hosts(Path(folder), PAIRS["llama-3.1-8b"], None, layers=24)
        with servers(hosts, None):
            wait_healthy(hosts)
            argv = [sys.executable, "-m", "disagg", "--config", str(hosts), "bench", "-m", "model", "--json"]
            argv += ["--beside", "16", "--prompt-tokens", "8000", "--output-tokens", "2", "-n", str(rounds)]
            argv += ["--mode", "disaggregated", "--mode", "split", "--mode", "prefill-alone", "--warmup", "0"]
            done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, env=environment(hosts))
    body = json.loads(done.stdout)
    return {
        one["mode"]: {"ttft_ms": one["median_ttft_ms"], "layers": one["mean_layers"], **(one["beside"] or {})}
        for one in body["results"]
    }


def write_hosts(folder: Path, pair: Pair, link: Namespaces | None, layers: int | None = None) -> Path:
    """hosts.toml of a pair, and its token. layers: what its prompts are split after, if not what is quickest."""
    path = folder / "hosts.toml"
    prepare_token(folder)
    path.write_text(
        HOSTS.format(
            source=source_of(pair, folder),
            prefill=pair.prefill,
            decode=pair.decode,
            dtype=DTYPE,
            addresses=link.addresses if link else ("127.0.0.1", "127.0.0.1"),
            kv_bytes=KV_BYTES,
            split="" if layers is None else f", split = {layers}",
        )
    )
    return path


def plans(args: argparse.Namespace) -> Iterator[str]:
    """A row for each pair, link and prompt length."""
    yield "| pair | link | tokens | layers planned | quickest | seconds | quickest | hand-off | decode machine alone |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    with tempfile.TemporaryDirectory(prefix="disagg-split-") as folder:
        for name in args.pair:
            for gbit in args.gbit:
                for tokens in args.tokens:
                    pair = pair_of(name, gbit, tokens, Path(folder))
                    layers, best = planned(pair, tokens).layers, best_split(pair, tokens - 1)
                    seconds = [takes(pair, tokens, one) for one in (layers, best.layers, pair.shape.layers, 0)]
                    shown = " | ".join(f"{one:.2f}" for one in seconds)
                    place = f"{name} | {gbit:g} Gb/s | {tokens:,}"
                    yield f"| {place} | {layers} of {pair.shape.layers} | {best.layers} | {shown} |"


def pair_of(name: str, gbit: float, tokens: int, folder: Path) -> SplitPair:
    machines = device(PAIRS[name].prefill), device(PAIRS[name].decode)
    return SplitPair(read_size(source_of(PAIRS[name], folder)), *machines, Link(gbit), DTYPE, split_chunk(tokens))


def planned(pair: SplitPair, tokens: int) -> Spans:
    """As a decode host plans a prompt if both hosts have measured the predicted speeds, of prompts about as long."""
    shape = pair.shape
    head, tail = (
        tokens / prefill(one, shape, tokens, DTYPE, pair.chunk_tokens).seconds for one in (pair.head, pair.tail)
    )
    layers = SplitLayout(shape.layers, tuple(range(shape.layers)), shape.hidden)
    offer = PrefillOffer(tokens_s=head, link_bytes_s=pair.link.bytes_per_s, splits=True, kv_version=KV_CHUNKS)
    return plan(Rest(0, tokens - 1), offer, Here(shape.layout(DTYPE), layers, tail, tail))


def takes(pair: SplitPair, tokens: int, layers: int) -> float:
    """Predicted seconds until the KV of all layers is there. Hand-off and local prefill are computed in longer
    chunks."""
    divided = 0 < layers < pair.shape.layers
    return split(pair if divided else replace(pair, chunk_tokens=WHOLE_CHUNK), tokens - 1, layers).seconds


def source_of(pair: Pair, folder: Path) -> str:
    """The source of its model, which is written into the folder if it has none."""
    path = folder / "config.json"
    if not pair.source:
        path.write_text(json.dumps(READ_AT_865))
    return pair.source or str(path)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
