"""Which size and which machine a name or source in hosts.toml or on the command line means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from disagg.errors import ModelError, UsageError
from disagg.planning.checkpoint import MXFP4_BITS, Packing, StoredWeights, file_size, read_object, stored_weights
from disagg.planning.devices import DEVICES, device
from disagg.planning.shapes import SHAPES, ModelShape, matching, shape

SHAPE: Final = "shape:"
_MLX_8BIT: Final = 8.5


def read_size(source: str) -> ModelShape:
    """The shape that a source names: `shape:NAME`, or the path of a config.json or of its folder. Raises UsageError or
    ModelError if it does not exist."""
    if source.startswith(SHAPE):
        return shape(source.removeprefix(SHAPE))
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source}: this user has no home folder here", "write the path out") from error
    return file_size(path)


def is_size(name: str) -> bool:
    """Whether this is a source for `read_size` and not the name of a model: `shape:NAME` or a path."""
    return name.startswith((SHAPE, ".", "/", "~"))


def size_source(model: str, sources: Collection[str]) -> str:
    """A source for `read_size`. The model's own files if they exist here, else the shape that its name or hub id
    contains. Raises UsageError if neither does."""
    for source in sources:
        path = Path(source)
        if source.startswith(SHAPE) or path.is_file() or (path / "config.json").is_file():
            return source
    if known := matching(model, *sources):
        return f"{SHAPE}{known.name}"
    raise UsageError(
        f"the size of {model} is unknown: neither its name nor its sources state it",
        f'add a source simulated = "{SHAPE}NAME", one of {", ".join(SHAPES)}, or the path of its config.json',
    )


def hardware_of(host: str, hardware: str | None, instead: str | None = None) -> str:
    """The name of the machine: `instead` if given, else as in hosts.toml. Raises UsageError if both are None or
    `instead` is unknown."""
    name = device(instead).name if instead else hardware
    if name is None:
        raise UsageError(
            f"the hardware of {host} is not stated in hosts.toml",
            f"add hardware = ..., one of {', '.join(DEVICES)}",
        )
    return name


def stored(source: str) -> StoredWeights | None:
    """What is known here of a source: a folder or config.json on this machine, or a hub id of the table below. None for
    others, and for architectures whose size cannot be computed."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return PUBLISHED.get(source)
    try:
        return stored_weights(read_object(file), file.parent.name)
    except ModelError:
        return None  # loading it reports what is wrong with the file


def local_config(source: str) -> Mapping[str, Any]:
    """The config.json of a source on this machine; empty if it is elsewhere, or cannot be read."""
    file = Path(source) / "config.json"
    try:
        return read_object(file) if file.is_file() else {}
    except ModelError:
        return {}  # loading it reports what is wrong with the file


def _published(name: str, packing: Packing, layers: float, experts: float, tables: float) -> StoredWeights:
    sized = replace(shape(name), weight_bits=layers, expert_bits=experts, head_bits=tables)
    return StoredWeights(sized, packing, name.startswith("gpt-oss"))


PUBLISHED: Final[Mapping[str, StoredWeights]] = {
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _published("qwen3-coder-30b", "none", 16, 16, 16),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": _published("qwen3-coder-30b", "fp8", 8, 8, 16),
    "mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit": _published(
        "qwen3-coder-30b", "mlx", _MLX_8BIT, _MLX_8BIT, _MLX_8BIT
    ),
    "openai/gpt-oss-120b": _published("gpt-oss-120b", "mxfp4", 16, MXFP4_BITS, 16),
    "openai/gpt-oss-20b": _published("gpt-oss-20b", "mxfp4", 16, MXFP4_BITS, 16),
    "mlx-community/gpt-oss-120b-MXFP4-Q8": _published("gpt-oss-120b", "mlx", _MLX_8BIT, MXFP4_BITS, _MLX_8BIT),
    "mlx-community/gpt-oss-20b-MXFP4-Q8": _published("gpt-oss-20b", "mlx", _MLX_8BIT, MXFP4_BITS, _MLX_8BIT),
}
"""Checkpoints on the hub whose size is known before a host has them: those of the shipped fleet and their relatives."""
