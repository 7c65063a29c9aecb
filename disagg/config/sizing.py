"""What predictions want to know of hosts.toml: how large a model is, and what machine a host is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from disagg.config.schema import Host, Model
from disagg.errors import UsageError
from disagg.roofline import checkpoint
from disagg.roofline.devices import DEVICES, device
from disagg.roofline.shapes import SHAPES, ModelShape, matching, shape

SHAPE: Final = "shape:"


def read_size(source: str) -> ModelShape:
    """The size that a source means: `shape:NAME`, or the path of a config.json or of its folder. UsageError or
    ModelError where there is no such thing."""
    if source.startswith(SHAPE):
        return shape(source.removeprefix(SHAPE))
    return checkpoint.read(Path(source).expanduser())


def size_source(model: Model) -> str:
    """A source for `read_size`: the model's own files where they are here, else what its name or hub id says."""
    for source in model.sources.values():
        path = Path(source)
        if source.startswith(SHAPE) or path.is_file() or (path / "config.json").is_file():
            return source
    if known := matching(model.name, *model.sources.values()):
        return f"{SHAPE}{known.name}"
    raise UsageError(
        f"how large is {model.name}? Neither its name nor its sources tell",
        f'give it a source simulated = "{SHAPE}NAME", one of {", ".join(SHAPES)}, or the path of its config.json',
    )


def hardware_of(host: Host, instead: str | None = None) -> str:
    """The name of the machine: `instead` where given, else what hosts.toml says. UsageError where it says nothing, or
    `instead` is no machine that is known."""
    name = device(instead).name if instead else host.hardware
    if name is None:
        raise UsageError(
            f"what machine is {host.name}? hosts.toml does not say",
            f"add hardware = ... to it, one of {', '.join(DEVICES)}",
        )
    return name
