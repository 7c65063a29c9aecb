"""What predictions want to know of hosts.toml: how large a model is, and what machine a host is."""

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
    """The size that a source means: `shape:NAME`, or the path of a config.json or of its folder. UsageError or
    ModelError where there is no such thing."""
    if source.startswith(SHAPE):
        return shape(source.removeprefix(SHAPE))
    return checkpoint.read(Path(source).expanduser())


def size_source(model: str, sources: Collection[str]) -> str:
    """A source for `read_size`: the model's own files where they are here, else what its name or hub id says."""
    for source in sources:
        path = Path(source)
        if source.startswith(SHAPE) or path.is_file() or (path / "config.json").is_file():
            return source
    if known := matching(model, *sources):
        return f"{SHAPE}{known.name}"
    raise UsageError(
        f"how large is {model}? Neither its name nor its sources tell",
        f'give it a source simulated = "{SHAPE}NAME", one of {", ".join(SHAPES)}, or the path of its config.json',
    )


def hardware_of(host: str, hardware: str | None, instead: str | None = None) -> str:
    """The name of the machine: `instead` where given, else what hosts.toml says. UsageError where it says nothing, or
    `instead` is no machine that is known."""
    name = device(instead).name if instead else hardware
    if name is None:
        raise UsageError(
            f"what machine is {host}? hosts.toml does not say",
            f"add hardware = ... to it, one of {', '.join(DEVICES)}",
        )
    return name
