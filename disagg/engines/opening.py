"""Opens an engine by the class that its value names. Frameworks are imported here and not before."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.base import PrefillEngine
from disagg.engines.decoding import DecodeEngine


def open_prefill(options: EngineOptions, source: str, context: int, hardware: str = "") -> PrefillEngine:
    """The engine `options.name`, with the model `source` loaded. hardware: the machine, for a simulated engine.
    ModelError or PreflightRefused if it cannot serve the model."""
    kind = options.kind
    engine = kind.follower if options.node_rank else kind.prefill
    opened: PrefillEngine = _open(engine, options, source, context, hardware)
    return opened


def open_decode(options: EngineOptions, source: str, context: int, hardware: str = "") -> DecodeEngine:
    """The engine `options.name`, with the model `source` loaded to decode. The rest as in `open_prefill`."""
    opened: DecodeEngine = _open(options.kind.decode, options, source, context, hardware)
    return opened


def _open(engine: str, options: EngineOptions, source: str, context: int, hardware: str) -> Any:
    module, _, name = engine.partition(":")
    machine = (hardware,) if options.kind.simulated else ()
    return getattr(import_module(module), name)(source, context, options, *machine)
