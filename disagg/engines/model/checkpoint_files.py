"""A checkpoint's files: read its JSON objects, and check that its weight files are complete.

Only headers and sizes of weight files are read, so the check is quick for a model of any size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disagg.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors format
_HINT = "download the model again"


def check_weights(folder: Path) -> None:
    """Raise ModelError, naming the file, if a shard is missing, truncated or malformed, or lacks an indexed tensor."""
    if (folder / INDEX).is_file():
        _check_index(folder)
        return
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"{folder}: no *.safetensors weights", "other weight formats are not read; convert the model")
    for shard in shards:
        _tensors(shard)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. ModelError if the file is missing or not a JSON object."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}", "download the model again") from error
    if not isinstance(body, dict):
        raise ModelError(f"{path}: not a JSON object", "download the model again")
    return body


def _check_index(folder: Path) -> None:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX}: no weight_map", _HINT)
    for shard in sorted(set(weight_map.values())):
        present = _tensors(folder / shard)
        missing = sorted(name for name, file in weight_map.items() if file == shard and name not in present)
        if missing:
            raise ModelError(f"{folder / shard}: {missing[0]} is missing, which {INDEX} places in it", _HINT)


def _tensors(shard: Path) -> set[str]:
    """Names of the tensors in a shard. ModelError if its header is malformed or its size differs from the header's."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{shard}: not a safetensors file, or truncated ({size} bytes)", _HINT)
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except OSError as error:
        raise ModelError(f"{shard}: cannot be read: {error.strerror or error}", _HINT) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{shard}: malformed safetensors header: {error!r}", _HINT) from error
    if size != 8 + length + end:
        raise ModelError(f"{shard}: {size} bytes, but its header describes {8 + length + end}", _HINT)
    return set(header)
