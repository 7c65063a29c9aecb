"""What a hand-off costs the prefill: the engine compared with a bare transformers forward pass, and while it sends.

    python -m benchmarks.prefill [--rounds 7] [--tokens 1024] [--gb-s 1.25]

A llama of 25 million random parameters on one compute thread, the prompt in chunks of 256 tokens, alternating:

    bare        model.model(chunk) on transformers' own DynamicCache
    engine      TransformersPrefillEngine.prefill, its blocks dropped
    sending     the same while another thread sends KV at --gb-s (1.25 is 10 GbE) to another process

Prints one JSON object: medians in tokens/s, the two ratios, and the slowdown in CPU time of the computing thread, which
excludes waiting for a core (here the receiver and the kernel's loopback compete for the cores). The machine must be
idle and have two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import transformers

import disagg.demo
from disagg.api.layout import LayerLayout, Layout
from disagg.config import EngineOptions
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.kv.arena import Arenas
from disagg.kv.blocks import KVBlock
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from disagg.servers.run import SWITCH_S

CHUNK_TOKENS = 256
TIMEOUT_S = 600.0
# Qwen3-Coder-30B's KV of one chunk, 201 MB, sent repeatedly while the prefill runs.
BLOCK_TOKENS = 2048
LAYOUT = Layout((LayerLayout("full", kv_heads=4, key_dim=128, value_dim=128),) * 48, "bfloat16")
FINGERPRINT = Fingerprint("benchmark", 1, "none", "none", "none", "none")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--tokens", type=int, default=1024)
    options.add_argument("--gb-s", type=float, default=1.25)
    args = options.parse_args()
    print(json.dumps(compare(args.rounds, args.tokens, args.gb_s), indent=2))


def compare(rounds: int, tokens: int, gb_s: float) -> dict[str, Any]:
    """Measure `rounds` rounds after a warm-up."""
    sys.setswitchinterval(SWITCH_S)  # as the servers do
    with tempfile.TemporaryDirectory() as folder:
        engine = TransformersPrefillEngine(
            make_model(Path(folder)),
            2 * tokens,
            EngineOptions("transformers", dtype="float32", threads=1, max_held_bytes=0),
        )
    prompt = numpy.random.default_rng(0).integers(8, 1000, tokens).tolist()
    sent: list[float] = []
    with BackgroundHandoff(gb_s) as background:
        ways: dict[str, Callable[[], Spent]] = {
            "bare": lambda: bare(engine, prompt),
            "engine": lambda: by_engine(engine, prompt),
            "sending": lambda: background.during(lambda: by_engine(engine, prompt), sent),
        }
        measured = [{name: way() for name, way in ways.items()} for _ in range(rounds + 1)][1:]
    rates = {name: tokens / statistics.median(one[name].wall for one in measured) for name in ways}
    return {
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_s": rates,
        "engine_over_bare": statistics.median(one["bare"].wall / one["engine"].wall for one in measured),
        "slowdown_while_sending": statistics.median(one["sending"].wall / one["engine"].wall for one in measured) - 1,
        "slowdown_of_its_thread": statistics.median(one["sending"].cpu / one["engine"].cpu for one in measured) - 1,
        "sent_gb_s": statistics.median(sent[1:]),
    }


def make_model(folder: Path, width: int = 512, layers: int = 8) -> Path:
    """Write a llama with random weights and the demo's tokenizer. width: of its hidden states."""
    demo = Path(disagg.demo.__file__).parent / "models" / "qwen3-moe-tiny"
    for file in demo.glob("*token*"):
        shutil.copy(file, folder)
    vocab = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=min(4, width // 64),
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Spent(NamedTuple):
    """Seconds of one prefill: wall clock, and CPU time of its thread."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Spent:
    cpu, began = time.thread_time(), time.perf_counter()
    work()
    return Spent(time.perf_counter() - began, time.thread_time() - cpu)


def bare(engine: Any, prompt: list[int]) -> Spent:
    """A prefill by transformers alone."""
    cache = transformers.DynamicCache()

    def forward() -> None:
        with torch.inference_mode():
            for start in range(0, len(prompt), CHUNK_TOKENS):
                ids = torch.tensor([prompt[start : start + CHUNK_TOKENS]])
                engine._model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)

    return timed(forward)


def by_engine(engine: Any, prompt: list[int]) -> Spent:
    """A prefill by the engine, whose blocks are dropped."""
    return timed(lambda: engine.prefill(prompt, lambda block: None, chunk_tokens=CHUNK_TOKENS))


class BackgroundHandoff:
    """Sends KV to a process of its own while something else is timed."""

    def __init__(self, gb_s: float) -> None:
        self._gb_s = gb_s
        noise = [numpy.random.default_rng(0).integers(0, 256, BLOCK_TOKENS * 256, numpy.uint8).data for _ in range(8)]
        self._heads = noise[:4], noise[4:]
        self._here, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)

    def __enter__(self) -> BackgroundHandoff:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._here.send("end")
        self._process.join(TIMEOUT_S)

    def during(self, work: Callable[[], Spent], sent: list[float]) -> Spent:
        """Run `work` while KV is sent at the given rate; appends the measured rate, GB/s, to `sent`."""
        stop, count = threading.Event(), [0]
        feeding = threading.Thread(target=self._feed, args=(stop, count))
        feeding.start()
        began = time.perf_counter()
        try:
            return work()
        finally:
            sent.append(count[0] / (time.perf_counter() - began) / 1e9)
            stop.set()
            feeding.join()

    def _feed(self, stop: threading.Event, count: list[int]) -> None:
        began = time.perf_counter()
        while not stop.is_set():
            self._here.send("offer")
            port, ticket = self._here.recv()
            header = Header(ticket, "background", FINGERPRINT, LAYOUT, token_hash([]), BLOCK_TOKENS)
            with Transfer.open("127.0.0.1", port, header, deadline=time.monotonic() + TIMEOUT_S) as transfer:
                for layer in range(len(LAYOUT.layers)):
                    transfer.send(KVBlock(layer, 0, BLOCK_TOKENS, *self._heads))
                    count[0] += LAYOUT.nbytes(BLOCK_TOKENS) // len(LAYOUT.layers)
                    due = began + count[0] / (self._gb_s * 1e9)
                    stop.wait(max(0.0, due - time.perf_counter()))
                transfer.finish()


def receive(parent: Connection) -> None:
    """Receive KV into the same memory again and again."""
    tickets = Tickets(Arenas(keep_bytes=2 * LAYOUT.nbytes(BLOCK_TOKENS)))
    outcomes: queue.Queue[KVOutcome] = queue.Queue()
    with KVServer("127.0.0.1", 0, tickets) as server:
        while parent.recv() == "offer":
            expected = Expected("background", LAYOUT, FINGERPRINT, token_hash([]), BLOCK_TOKENS)
            slot = tickets.issue(expected, outcomes.put, deadline=time.monotonic() + TIMEOUT_S)
            parent.send((server.port, slot.ticket))
            outcome = outcomes.get(timeout=TIMEOUT_S)
            if isinstance(outcome, ReceivedKV):
                outcome.release(reuse=True)


if __name__ == "__main__":
    main()
