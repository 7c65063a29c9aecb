"""Which model shape and which machine a name in hosts.toml or on the command line means."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from disagg.errors import UsageError
from disagg.planning import checkpoint
from disagg.planning.devices import DEVICES, device
from disagg.planning.shapes import SHAPES, ModelShape, matching, shape

SHAPE: Final = "shape:"


def read_size(source: str) -> ModelShape:
    """The shape that a source names: `shape:NAME`, or the path of a config.json or of its folder. Raises UsageError or
    ModelError if it does not exist."""
    if source.startswith(SHAPE):
        return shape(source.removeprefix(SHAPE))
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source}: this user has no home folder here", "write the path out") from error
    return checkpoint.read(path)


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
