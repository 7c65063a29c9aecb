"""A checkpoint's files: read its JSON objects, check that its weight files are complete, and state their form.

Only headers and sizes of weight files are read, so the check is quick for a model of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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


def weights_form(path: Path, dtype: str, quantization: str | None = None) -> str:
    """`bfloat16`, `fp8`, `mxfp4` or `8-bit, groups of 64`: of the checkpoint in folder `path`. dtype: of weights that
    are not packed. quantization: the option of hosts.toml, which converts those."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return form_of_weights(config, dtype, quantization)


def form_of_weights(config: Mapping[str, Any], dtype: str, quantization: str | None = None) -> str:
    """See `weights_form`."""
    if mlx := config.get("quantization"):
        return " and ".join(_distinct([_group(mlx), *(_group(one) for one in mlx.values() if isinstance(one, dict))]))
    packed = config.get("quantization_config") or {}
    if method := packed.get("quant_method"):
        bits = packed.get("bits")
        return f"{bits}-bit {method}" if bits else str(method)
    return quantization or dtype


def _group(one: Mapping[str, Any]) -> str:
    if one.get("mode", "affine") != "affine":
        return str(one["mode"])
    return f"{one['bits']}-bit, groups of {one['group_size']}"


def _distinct(forms: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(forms))
