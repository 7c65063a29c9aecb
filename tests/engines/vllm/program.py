"""`.venv-vllm/bin/python -m tests.engines.vllm.program FOLDER`: vLLM's KV against transformers'.

The folder is a tiny checkpoint. Prints a JSON object: the largest difference of any key or value, as
sent and received, and what is held after requests that were cancelled at random. Run in the environment with vLLM.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from disagg.api.names import AS_IS, INT8, WireForm
from disagg.config import EngineOptions
from disagg.engines.base import SendingRun
from disagg.engines.process import exit_without_cleanup
from disagg.engines.vllm.engine import VLLMEngine
from disagg.errors import DisaggError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import Tickets
from disagg.kv.received import ReceivedKV
from tests import tiny_models

CONTEXT = 2048
STEP_TOKENS = 96
CANCELLED = 200
TOGETHER = 8
PATIENCE_S = 60.0


class Begun(NamedTuple):
    """A prompt that is computed: its run, where its KV arrives, and its ticket."""

    run: SendingRun
    arrived: queue.Queue[Any]
    ticket: str


class Bench:
    """One loaded engine, and the receiver that its KV is sent to."""

    def __init__(self, folder: Path) -> None:
        options = EngineOptions(
            "vllm",
            dtype="float32",
            device="cpu",
            chunk_tokens=STEP_TOKENS,
            threads=1,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
        )
        self.engine = VLLMEngine(folder, CONTEXT, options)
        self.tickets = Tickets()
        self.server = KVServer("127.0.0.1", 0, self.tickets)
        self.server.__enter__()
        self.reference = Reference(folder)

    def begin(self, tokens: Sequence[int], start: int = 0, salt: str = "", wire: WireForm = AS_IS) -> Begun:
        """Send the KV of tokens[:-1]."""
        info = self.engine.info
        arrived: queue.Queue[Any] = queue.Queue()
        count, digest = len(tokens) - 1, token_hash(tokens)
        expected = Expected("r", info.layout, info.fingerprint, digest, count, start, wires=(wire,))
        deadline = time.monotonic() + PATIENCE_S
        slot = self.tickets.issue(expected, arrived.put, deadline=deadline)
        header = Header(slot.ticket, "r", info.fingerprint, info.layout, digest, count, start, wire)
        to = (self.server.host, self.server.port)
        run = self.engine.send(tokens[:-1], to, header, deadline=deadline, next_token=tokens[-1], salt=salt)
        return Begun(run, arrived, slot.ticket)

    def difference(self, prompts: Sequence[Sequence[int]], start: int = 0, salt: str = "") -> tuple[float, list[int]]:
        """The largest difference over these prompts, computed together; and how many tokens of each were held."""
        begun = [self.begin(tokens, start, salt) for tokens in prompts]
        while not all(one.run.done for one in begun):
            next(one.run for one in begun if not one.run.done).step()
        worst = 0.0
        for tokens, (run, arrived, _) in zip(prompts, begun, strict=True):
            sent = run.sent()
            kv = arrived.get(timeout=PATIENCE_S)
            assert isinstance(kv, ReceivedKV), kv
            assert sent.payload_bytes == self.engine.info.layout.nbytes(len(tokens) - 1, start)
            assert run.timing.tokens == len(tokens) - 1 - run.held, run.timing
            worst = max(worst, self.reference.difference(tokens[:-1], start, kv))
            kv.release()
            run.close()
        return worst, [one.run.held for one in begun]

    def quantised(self, tokens: Sequence[int]) -> float:
        """The largest difference of a prompt that is sent with eight bits, in steps of its quantisation."""
        begun = self.begin(tokens, wire=INT8)
        while not begun.run.done:
            begun.run.step()
        begun.run.sent()
        kv = begun.arrived.get(timeout=PATIENCE_S)
        assert isinstance(kv, ReceivedKV) and kv.wire == INT8, kv
        worst = self.reference.difference_in_steps(tokens[:-1], kv)
        kv.release()
        begun.run.close()
        return worst

    def beside_a_longer_one(self, long: Sequence[int], short: Sequence[int]) -> tuple[float, list[int]]:
        """As `difference`, of a short prompt that comes when a long one is computed, and ends before it."""
        first = self.begin(long)
        first.run.step()
        found = self.difference([short])
        assert not first.run.done, "the short prompt waited for all of the long one"
        self.end(first)
        return found

    def end(self, begun: Begun) -> None:
        """Give a prompt up, and what has arrived of it."""
        begun.run.close()
        self.tickets.revoke(begun.ticket)
        outcome = begun.arrived.get(timeout=PATIENCE_S)
        if isinstance(outcome, ReceivedKV):
            outcome.release()

    def cancel_at_random(self, chance: random.Random) -> None:
        """Prompts that are given up before, while and after they are computed."""
        for _ in range(CANCELLED // TOGETHER):
            begun = [self.begin(prompt(chance, chance.randrange(2, 400))) for _ in range(TOGETHER)]
            for _ in range(chance.randrange(6)):
                if not all(one.run.done for one in begun):
                    next(one.run for one in begun if not one.run.done).step()
            for one in begun:
                self.end(one)

    def held(self) -> dict[str, int]:
        """What should be nothing once no request is left."""
        scheduler = self.engine._vllm.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(scheduler.requests),
            "orders": scheduler.connector.scheduler.prompts,
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "reports": self.engine._reports.outstanding,
            "tickets": self.tickets.outstanding,
        }


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits_differ(self, tokens: Sequence[int], logits: Any) -> float:
        """The largest difference of log-probabilities after the last tokens."""
        torch = self._torch
        with torch.inference_mode():
            whole = self._model(torch.tensor([list(tokens)])).logits[0, -len(logits) :].log_softmax(-1)
        return float((torch.from_numpy(logits) - whole).abs().max())

    def _cache(self, tokens: Sequence[int]) -> Any:
        from transformers.cache_utils import DynamicCache

        torch, cache = self._torch, DynamicCache()  # without a config it keeps every row, of sliding layers too
        with torch.inference_mode():
            self._model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        return cache

    def difference_in_steps(self, tokens: Sequence[int], kv: ReceivedKV) -> float:
        """Of KV with eight bits. Each group of 64 has a step of its own."""
        torch, cache, worst = self._torch, self._cache(tokens), 0.0
        for index, layer in enumerate(kv.layout.layers):
            rows = layer.rows(len(tokens), 0)
            for planes, whole in (
                (kv.keys[index], cache.layers[index].keys),
                (kv.values[index], cache.layers[index].values),
            ):
                shape = (layer.kv_heads, len(rows), -1, 64)
                packed = torch.frombuffer(memoryview(planes[0].tobytes()), dtype=torch.uint8).reshape(shape)
                scale, bias = (
                    torch.frombuffer(memoryview(plane.tobytes()), dtype=torch.float32).reshape(*shape[:3], 1)
                    for plane in planes[1:]
                )
                want = whole[0][:, rows.start : rows.stop].reshape(shape)
                worst = max(worst, float(((packed.float() * scale + bias - want) / scale).abs().max()))
        return worst

    def difference(self, tokens: Sequence[int], start: int, kv: ReceivedKV) -> float:
        torch, cache = self._torch, self._cache(tokens)
        worst = 0.0
        for index, layer in enumerate(kv.layout.layers):
            rows = layer.rows(len(tokens), start)
            for planes, whole in (
                (kv.keys[index], cache.layers[index].keys),
                (kv.values[index], cache.layers[index].values),
            ):
                got = torch.frombuffer(memoryview(planes[0].tobytes()), dtype=torch.float32).reshape(
                    layer.kv_heads, len(rows), -1
                )
                worst = max(worst, float((got - whole[0][:, rows.start : rows.stop]).abs().max()))
        return worst


def prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(8, tiny_models.VOCAB) for _ in range(length)]


def examine(folder: Path) -> dict[str, Any]:
    """All cases of one model."""
    chance = random.Random(7)
    bench = Bench(folder)
    beats: list[None] = []
    bench.engine.on_beat = lambda: beats.append(None)
    found: dict[str, Any] = {"model": folder.name, "worst": {}, "prefix tokens": {}}
    long = prompt(chance, 301)
    cases: dict[str, Callable[[], tuple[float, list[int]]]] = {
        "lengths": lambda: bench.difference([prompt(chance, n) for n in (2, 63, 65, 130, 257)]),
        "chunks": lambda: bench.difference([long]),
        "prefix": lambda: bench.difference([[*long[:280], *prompt(chance, 60)]]),
        "whole prefix": lambda: bench.difference([long]),
        "another salt": lambda: bench.difference([long], salt="another"),
        "from a token on": lambda: bench.difference([prompt(chance, 301)], start=200),
        "beside a longer one": lambda: bench.beside_a_longer_one(prompt(chance, 1500), prompt(chance, 40)),
        "eight at once": lambda: bench.difference([prompt(chance, n) for n in range(90, 98)]),
    }
    for name, case in cases.items():
        worst, held = case()
        found["worst"][name] = worst
        found["prefix tokens"][name] = max(held)
    found["steps of int8"] = bench.quantised(prompt(chance, 200))
    found["logits"] = [
        bench.reference.logits_differ(long, bench.engine.logits(long, 9, chunk_tokens=pieces)) for pieces in (None, 130)
    ]
    bench.cancel_at_random(chance)
    deadline = time.monotonic() + PATIENCE_S
    while any(bench.held().values()) and time.monotonic() < deadline:
        with suppress(DisaggError):
            bench.engine.step()
        time.sleep(0.05)
    found["held"] = bench.held()
    found["beats"] = len(beats)
    found["worst"]["after them"], _ = bench.difference([prompt(chance, 200)])
    bench.server.close()
    bench.engine.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(examine(Path(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    exit_without_cleanup(0)
