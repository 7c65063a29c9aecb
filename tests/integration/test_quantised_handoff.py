"""int8 on the wire, from torch to mlx: exactly mx.quantize's loss and no other, and said wherever figures are shown."""

from __future__ import annotations

import json
import queue
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from disagg.api.layout import BITS, GROUP
from disagg.api.names import AS_IS, INT8, WIRE_FORMS, WireForm
from disagg.config import EngineOptions
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import memory as mlx_memory
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import DisaggError
from disagg.inference.metrics import Metrics
from disagg.kv.arena import Arenas
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import Tickets
from disagg.kv.received import ReceivedKV
from disagg.kv.transfer import Transfer
from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleets import RunningFleet, running, write_hosts
from tests.simulated import CONFIG, write_simulated

WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
ANSWER: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "local_prefill": False}
PATIENCE_S = 60.0


def prompt(length: int, seed: int = 3) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(8, tiny_models.VOCAB) for _ in range(length)]


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, full layers alone or windows of 64 tokens between them."""
    return tiny_models.make(request.param, tmp_path_factory.mktemp(request.param) / "model", **WIDE)


def hand_over(engine: TransformersPrefillEngine, tokens: list[int], wire: WireForm) -> ReceivedKV:
    """The KV of all but the last token, through a real transfer."""
    arrived: queue.Queue[ReceivedKV | DisaggError] = queue.Queue()
    tickets = Tickets(Arenas(mlx_memory.allocate))
    info, n, deadline = engine.info, len(tokens) - 1, time.monotonic() + PATIENCE_S
    identity = ("r", info.fingerprint, info.layout, token_hash(tokens), n)
    with KVServer("127.0.0.1", 0, tickets) as server:
        expected = Expected("r", info.layout, info.fingerprint, token_hash(tokens), n, wires=WIRE_FORMS)
        slot = tickets.issue(expected, arrived.put, deadline=deadline)
        header = Header(slot.ticket, *identity, wire=wire)
        with Transfer.open("127.0.0.1", server.port, header, deadline=deadline) as transfer:
            engine.prefill(tokens[:-1], transfer.send, chunk_tokens=48, wire=wire)
            assert transfer.finish().payload_bytes == info.layout.nbytes(n, wire=wire)
        kv = arrived.get(timeout=PATIENCE_S)
    assert isinstance(kv, ReceivedKV)
    return kv


def caches(kv: ReceivedKV) -> list[Any]:
    """Keys and values of every layer, as mlx-lm gets them."""
    windows = [layer.window for layer in kv.layout.layers]
    shell = SimpleNamespace(make_cache=lambda: [KVCache() if w is None else RotatingKVCache(w) for w in windows])
    return [array for cache in mlx_cache.build(shell, kv) for array in (cache.keys, cache.values)]


def raw(array: Any) -> bytes:
    return bytes(memoryview(array.view(mx.uint8)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_caches_are_bit_for_bit_what_mlx_makes_of_the_exact_ones(model: Path, dtype: Any) -> None:
    engine = TransformersPrefillEngine(model, 8192, EngineOptions("transformers", dtype=dtype, device="cpu", threads=1))
    tokens = prompt(201)
    exact, arrived = (caches(hand_over(engine, tokens, wire)) for wire in (AS_IS, INT8))
    assert len(exact) == len(arrived) == 2 * len(engine.info.layout.layers)
    for before, after in zip(exact, arrived, strict=True):
        kept = mx.dequantize(*mx.quantize(before, group_size=GROUP, bits=BITS), group_size=GROUP, bits=BITS)
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert raw(after) == raw(kept) != raw(before)


def test_the_likeliest_next_token_is_nearly_always_the_same(model: Path) -> None:
    """Over 200 forced tokens. Random weights and four experts to choose from: trained models are kinder than these."""
    prefill = TransformersPrefillEngine(model, 8192, EngineOptions("transformers", "float32", "cpu", threads=1))
    decode = MLXDecodeEngine(model, 8192, EngineOptions("mlx", "float32", "cpu", threads=1))
    tokens, last = prompt(500), 200
    try:
        alone, exact, arrived = (
            numpy.array(decode.logits(tokens, last, kv))
            for kv in (None, *(hand_over(prefill, tokens[: 1 - last], wire) for wire in (AS_IS, INT8)))
        )
    finally:
        decode.close()
    assert (exact.argmax(-1) == alone.argmax(-1)).all()
    assert (arrived.argmax(-1) == alone.argmax(-1)).mean() >= 0.93
    assert 0 < kl(alone, arrived) < 1e-2


def kl(right: Any, other: Any) -> float:
    """Mean Kullback-Leibler divergence of next-token distributions, in nats."""
    p, q = (x - x.max(-1, keepdims=True) for x in (right, other))
    p, q = (x - numpy.log(numpy.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((numpy.exp(p) * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    hosts = write_hosts(tmp_path_factory.mktemp("int8"), {"m": model}, prefill={"chunk_tokens": 48, "kv_wire": "int8"})
    with running(hosts) as fleet:
        yield fleet


def test_real_servers_say_so_wherever_figures_are_shown(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        handed_over = client.generate("m", tokens=prompt(300), **ANSWER).metrics
        alone = client.generate("m", tokens=prompt(300), alone="decode", max_tokens=1, cache_salt="alone").metrics
    assert (handed_over.method, handed_over.decode_computed_tokens) == ("disaggregated", 1)
    assert (handed_over.kv_wire, alone.kv_wire) == ("int8-g64", None)
    for host, event in (("m-prefill", "prefilled"), ("m-decode", "decoded")):
        wait_until(lambda: logged(fleet, host, event), PATIENCE_S, f"{event} in the log of {host}")  # noqa: B023 - called in this turn of the loop
        assert logged(fleet, host, event)[0]["kv_wire"] == "int8-g64"


def test_prompts_of_every_length_are_handed_over(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        for length in (2, 64, 65, 129):
            options: dict[str, Any] = {"max_tokens": 4, "local_prefill": False, "cache_salt": f"length {length}"}
            metrics = client.generate("m", tokens=prompt(length), **options).metrics
            assert (metrics.method, metrics.decode_computed_tokens) == ("disaggregated", 1)
            assert metrics.kv_wire == "int8-g64"


def logged(fleet: RunningFleet, host: str, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in fleet.log(host).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def heavy_kv(folder: Path, kv_wire: str) -> Path:
    """A simulated pair whose KV no loopback carries as fast as it is computed: 256 KiB a token."""
    path = write_simulated(folder)
    heads = {"num_key_value_heads": 16, "head_dim": 512}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **heads}))
    text = path.read_text().replace('{name = "simulated"', f'{{name = "simulated", kv_wire = "{kv_wire}"', 1)
    path.write_text(text)
    return path


def ask(fleet: RunningFleet, tokens: int = 700) -> Metrics:
    with fleet.client() as client:
        answer = client.generate("m", tokens=[1] * (tokens + 1), max_tokens=2, cache_salt=secrets.token_hex(4))
        return answer.metrics


def test_auto_sends_the_first_prompts_as_they_are_and_then_int8_over_a_link_that_is_too_slow(tmp_path: Path) -> None:
    with running(heavy_kv(tmp_path, "auto")) as fleet:
        first, second, third = (ask(fleet) for _ in range(3))
        assert [metrics.kv_wire for metrics in (first, second, third)] == ["as-is", "as-is", "int8-g64"]
        assert third.kv_bytes / first.kv_bytes == 136 / 256
        *_, before, after = logged(fleet, "m-prefill", "kv_wire")
        assert (before["chosen"], before["link_bytes_per_s"]) == ("as-is", None)
        assert after["chosen"] == "int8-g64" and after["link_bytes_per_s"] > 0


def test_auto_leaves_kv_as_it_is_where_the_link_keeps_up(tmp_path: Path) -> None:
    path = write_simulated(tmp_path, prefill="m4-max")
    path.write_text(path.read_text().replace('{name = "simulated"', '{name = "simulated", kv_wire = "auto"', 1))
    with running(path) as fleet:
        assert [ask(fleet).kv_wire for _ in range(3)] == ["as-is"] * 3


def test_without_being_asked_nothing_is_ever_quantised(tmp_path: Path) -> None:
    with running(heavy_kv(tmp_path, "as-is")) as fleet:
        assert [ask(fleet).kv_wire for _ in range(3)] == ["as-is"] * 3
