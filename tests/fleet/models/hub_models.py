"""Small models as the hub's cache and as plain folders hold them."""

import hashlib
import json
import os
import random
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"
SOURCE = "someone/tiny-model"


def files(megabytes: int = 2, seed: int = 1) -> dict[str, bytes]:
    """A model's files; its weights are random bytes in one tensor of each of two shards."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    weight_map = {"one": "model-00001-of-00002.safetensors", "two": "model-00002-of-00002.safetensors"}
    made = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
    }
    for number, (name, shard) in enumerate(weight_map.items()):
        data = random.Random(seed + number).randbytes((megabytes << 20) // 2)
        header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        made[shard] = len(header).to_bytes(8, "little") + header + data
    return made


def write_folder(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def write_hub(cache: Path, content: dict[str, bytes], source: str = SOURCE, revision: str = REVISION) -> Path:
    """The model in a hub cache: large files named by their SHA-256, small ones as git does."""
    root = cache / ("models--" + source.replace("/", "--"))
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs/main").write_text(revision)
    for name, data in content.items():
        large = name.endswith(".safetensors")
        blob = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (root / "blobs" / blob).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return root


def own(folder: Path, user: int = 2000) -> None:
    """Give a tree to a host's account."""
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, user, user)


def content(folder: Path) -> dict[str, bytes]:
    """Files by name, links followed."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
