"""Prefill at full size on this machine's GPU: its speed, its KV's way off the card and over a socket, its memory.

    python -m benchmarks.full_size [--device cuda] [--shape llama-3.1-8b] [--tokens 2048 8192 32768] [--rounds 3]

A llama with the shape's sizes and random weights, one prompt at a time in chunks of --chunk tokens, in turn:

    bare      transformers' own forward pass and DynamicCache
    engine    TransformersPrefillEngine, whose rows are copied to the host and dropped
    sent      the same, sent over loopback to a process that receives them into memory that it has used before

Prints one JSON object. By prompt length: medians in tokens/s; the first prompt of a length, which has to allocate; of
`sent` the seconds until its first block was ready, and of its transfer the part that was hidden by the computation.
`copies`: what the profiler saw of one prompt: bytes and rates of copies to the host, how many went to pinned memory, on
which streams, and for how much of their time the GPU computed. `memory`: the card's, measured and as planned.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, get_args

import numpy
import torch
import transformers

import disagg.demo
from disagg.api.layout import Layout
from disagg.config import DType, EngineOptions
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.kv.arena import Arenas
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from disagg.planning.memory import Loading, need
from disagg.planning.shapes import ModelShape
from disagg.planning.sizing import is_size, read_size, stored

TIMEOUT_S: Final = 600.0
FINGERPRINT: Final = Fingerprint("benchmark", 1, "none", "none", "none", "none")
Figures = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
    options.add_argument("--shape", default="llama-3.1-8b", help="of disagg/planning/shapes.toml, or a config.json")
    options.add_argument("--layers", type=int, help="fewer than the shape has")
    options.add_argument("--model", type=Path, help="a checkpoint, instead of a shape and random weights")
    options.add_argument("--chunk", type=int, default=2048)
    options.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    if args.model is not None:
        print(json.dumps(measure(args.model, args), indent=1))
        return
    shape = read_size(args.shape if is_size(args.shape) else f"shape:{args.shape}")
    with tempfile.TemporaryDirectory(prefix="disagg-full-size-") as folder:
        write_model(Path(folder), replace(shape, windows=shape.windows[: args.layers]), args.dtype, args.device)
        print(json.dumps({"shape": shape.name, **measure(Path(folder), args)}, indent=1))


def measure(folder: Path, args: argparse.Namespace) -> Figures:
    engine_options = EngineOptions(
        "transformers", dtype=args.dtype, device=args.device, chunk_tokens=args.chunk, max_held_bytes=0
    )
    began, context = time.monotonic(), max(args.tokens)
    engine = TransformersPrefillEngine(folder, context, engine_options)
    loaded = time.monotonic()
    found: Figures = {
        "layers": engine.info.split.layers,
        "backend": engine.info.backend,
        "versions": engine.info.versions,
        "card": torch.cuda.get_device_name() if _cuda(engine) else "",
        "dtype": args.dtype,
        "chunk_tokens": args.chunk,
        "load_s": round(loaded - began, 1),
        "prompts": {},
    }
    with Receiver(engine.info.layout, context) as receiver:
        for tokens in args.tokens:
            found["prompts"][tokens] = by_length(engine, receiver, tokens, args.chunk, args.rounds)
        if _cuda(engine):
            found["copies"] = copies(lambda: sent(engine, receiver, prompt_of(min(8192, context))))
    found["memory"] = memory(engine, engine_options, folder, context)
    return found


def write_model(folder: Path, shape: ModelShape, dtype: str, device: str) -> None:
    """A checkpoint with random weights, made on the device, and the demo's tokenizer."""
    demo = Path(disagg.demo.__file__).parent / "models" / "qwen3-moe-tiny"
    for file in demo.glob("*token*"):
        shutil.copy(file, folder)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=shape.tied,
    )
    config.dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")):
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def by_length(engine: TransformersPrefillEngine, receiver: Receiver, tokens: int, chunk: int, rounds: int) -> Figures:
    """Medians of the rounds after the first, which warms up."""
    prompt = prompt_of(tokens)
    ways: Mapping[str, Callable[[], Figures]] = {
        "bare": lambda: bare(engine, prompt, chunk),
        "engine": lambda: dropped(engine, prompt),
        "sent": lambda: sent(engine, receiver, prompt),
    }
    measured = [{name: way() for name, way in ways.items()} for _ in range(rounds + 1)]
    first, rest = measured[0], measured[1:]
    return {
        "tokens_per_s": {name: round(tokens / _median(rest, name, "seconds")) for name in ways},
        "engine_over_bare": _ratio(rest, "bare", "engine"),
        "sent_over_engine": _ratio(rest, "engine", "sent"),
        "sent": {key: round(_median(rest, "sent", key), 4) for key in first["sent"]},
        "first_prompt_s": {name: round(first[name]["seconds"], 3) for name in ways},
        "first_prompt_exposed_s": round(first["sent"]["exposed_s"], 3),
    }


def _median(rounds: Sequence[Mapping[str, Figures]], way: str, key: str) -> float:
    return float(statistics.median(one[way][key] for one in rounds))


def _ratio(rounds: Sequence[Mapping[str, Figures]], way: str, other: str) -> float:
    return round(float(statistics.median(one[way]["seconds"] / one[other]["seconds"] for one in rounds)), 3)


def prompt_of(tokens: int) -> list[int]:
    found: list[int] = numpy.random.default_rng(0).integers(8, 1000, tokens).tolist()
    return found


def bare(engine: TransformersPrefillEngine, prompt: Sequence[int], chunk: int) -> Figures:
    """transformers alone."""
    cache, began = transformers.DynamicCache(), time.monotonic()
    with torch.inference_mode():
        for start in range(0, len(prompt), chunk):
            ids = torch.tensor([prompt[start : start + chunk]], device=engine._device)
            engine._model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        engine._forward.finish()
    return {"seconds": time.monotonic() - began}


def dropped(engine: TransformersPrefillEngine, prompt: Sequence[int]) -> Figures:
    """The engine, whose blocks nobody reads."""
    return {"seconds": engine.prefill(prompt, lambda block: None).compute_s}


def sent(engine: TransformersPrefillEngine, receiver: Receiver, prompt: Sequence[int]) -> Figures:
    """The engine, whose blocks are sent. seconds: of the computation."""
    header = receiver.offer(len(prompt))
    with Transfer.open("127.0.0.1", receiver.port, header, deadline=time.monotonic() + TIMEOUT_S) as transfer:
        timing = engine.prefill(prompt, transfer.send)
        result = transfer.finish()
    kv = result.sent(timing.ended, timing.steps)
    moved = kv.hidden_s + kv.exposed_s
    return {
        "seconds": timing.compute_s,
        "first_block_s": result.spans[0].began - timing.started,
        "kv_gb": kv.payload_bytes / 1e9,
        "sending_s": sum(span.ended - span.began for span in result.spans),
        "hidden_s": kv.hidden_s,
        "exposed_s": kv.exposed_s,
        "hidden_share": kv.hidden_s / moved if moved else 0.0,
    }


class Receiver:
    """A process that receives KV into the same memory again and again."""

    def __init__(self, layout: Layout, context: int) -> None:
        self._layout = layout
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=receive, args=(there, layout, layout.nbytes(context)))

    def __enter__(self) -> Receiver:
        self._process.start()
        self.port: int = self._here.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self._here.send(0)
        self._process.join(TIMEOUT_S)

    def offer(self, tokens: int) -> Header:
        """The header of a transfer that it waits for."""
        self._here.send(tokens)
        return Header(self._here.recv(), "full-size", FINGERPRINT, self._layout, token_hash([]), tokens)


def receive(parent: Connection, layout: Layout, keep_bytes: int) -> None:
    """The receiver's part: for each number of tokens a ticket, until that is 0."""
    tickets = Tickets(Arenas(keep_bytes=2 * keep_bytes))
    outcomes: queue.Queue[KVOutcome] = queue.Queue()
    with KVServer("127.0.0.1", 0, tickets) as server:
        parent.send(server.port)
        while tokens := parent.recv():
            while not outcomes.empty():
                if isinstance(outcome := outcomes.get(), ReceivedKV):
                    outcome.release(reuse=True)
            expected = Expected("full-size", layout, FINGERPRINT, token_hash([]), tokens)
            parent.send(tickets.issue(expected, outcomes.put, deadline=time.monotonic() + TIMEOUT_S).ticket)


def copies(work: Callable[[], object]) -> Figures:
    """What the GPU did meanwhile, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    return copies_in(events)


def copies_in(events: Sequence[Mapping[str, Any]]) -> Figures:
    """The copies to the host among the events of a trace, whose times are in microseconds."""
    done = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    to_host = [event for event in done if "DtoH" in event["name"]]
    streams = {event["args"]["stream"] for event in to_host}
    kernels = merged((e["ts"], e["ts"] + e["dur"]) for e in done if e["cat"] == "kernel")
    copying = merged((e["ts"], e["ts"] + e["dur"]) for e in to_host)
    nbytes, busy = sum(event["args"]["bytes"] for event in to_host), _length(copying)
    both = sum(_length(_within(kernels, span)) for span in copying)
    return {
        "copies": len(to_host),
        "to_pinned": sum("Pinned" in event["name"] for event in to_host),
        "gb": round(nbytes / 1e9, 3),
        "gb_s": round(nbytes / busy / 1e3, 1) if busy else 0.0,
        "streams": sorted(streams),
        "streams_of_kernels": sorted({event["args"]["stream"] for event in done if event["cat"] == "kernel"}),
        "share_beside_kernels": round(both / busy, 3) if busy else 0.0,
        "kernels_s": round(_length(kernels) / 1e6, 4),
        "copying_s": round(busy / 1e6, 4),
    }


Spans = list[tuple[float, float]]


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same times without overlaps, in order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _within(spans: Spans, bounds: tuple[float, float]) -> Spans:
    begin, end = bounds
    return [(max(one, begin), min(other, end)) for one, other in spans if one < end and other > begin]


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def memory(engine: TransformersPrefillEngine, options: EngineOptions, folder: Path, context: int) -> Figures:
    """Bytes: what PyTorch has for the longest prompt, what the card has used in all, and what `disagg fit` counts."""
    layout, known = engine.info.layout, stored(str(folder))
    kind, device = options.kind, engine._device.type
    loading = Loading(kind, device, options.dtype, context, options.chunk_tokens, layout.nbytes(context))
    planned = need(known, loading) if known is not None else None
    found: Figures = {"weights": engine.info.memory_bytes, "planned": asdict(planned) if planned else None}
    if _cuda(engine):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        dropped(engine, prompt_of(context))
        free, total = torch.cuda.mem_get_info()
        host = torch.cuda.host_memory_stats()
        found |= {
            "most_allocated": torch.cuda.max_memory_allocated(),
            "most_reserved": torch.cuda.max_memory_reserved(),
            "card_used": total - free,
            "card_total": total,
            "host": {key: value for key, value in host.items() if "peak" in key or "num" in key or "time" in key},
        }
    return found


def _cuda(engine: TransformersPrefillEngine) -> bool:
    return engine.info.backend == "transformers/cuda"


if __name__ == "__main__":
    main()
