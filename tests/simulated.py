"""A simulated fleet for tests: a model that is heavy to read and whose KV is light, so that times are long and bytes
few."""

from __future__ import annotations

import json
from pathlib import Path

from tests.ports import free_ports

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
LAYERS = 8
ROW_BYTES = LAYERS * 2 * 2 * 64 * 2
"""KV of one token: layers, keys and values, heads, dim, bfloat16."""
HIDDEN_BYTES = 2048 * 2


def write_config(folder: Path, **changes: object) -> Path:
    """The model's config.json, as a source for simulated engines."""
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


def write_simulated(
    folder: Path,
    *,
    chunk_tokens: int = 512,
    prefill: str = "h200-sxm",
    decode: str = "h200-sxm",
    pairs: int = 1,
    max_batch: int = 0,
) -> Path:
    """hosts.toml with the hosts m-prefill and m-decode, m-prefill-2 and so on; the default machines are fast.
    max_batch: of decode hosts, if not the default."""
    source, ports = write_config(folder), iter(free_ports(3 * pairs))
    engine = f'engine = {{name = "simulated", chunk_tokens = {chunk_tokens}}}'
    decoding = engine.replace("}", f", max_batch = {max_batch}}}") if max_batch else engine
    shared = 'address = "127.0.0.1"\nmodel = "m"\nconnector = "local"\nservice = "process"'
    path = folder / "hosts.toml"
    path.write_text(
        f'[fleet]\nname = "simulated-test"\n[models.m]\ncontext = 16384\nsources = {{simulated = "{source}"}}\n'
        + "".join(
            f'[hosts.m-prefill{pair}]\n{shared}\nroles = ["prefill"]\nport = {next(ports)}\n'
            f'hardware = "{prefill}"\n{engine}\n'
            f'[hosts.m-decode{pair}]\n{shared}\nroles = ["decode"]\nport = {next(ports)}\nkv_port = {next(ports)}\n'
            f'hardware = "{decode}"\n{decoding}\n'
            for pair in ("", *(f"-{number}" for number in range(2, pairs + 1)))
        )
    )
    return path
