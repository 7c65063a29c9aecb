"""Opens an engine by the module that its value names. Frameworks are imported here and not before."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.base import DecodeEngine, PrefillEngine


def open_prefill(options: EngineOptions, source: str, context: int, hardware: str = "") -> PrefillEngine:
    """The engine `options.name`, with the model `source` loaded. hardware: the machine, for a simulated engine.
    ModelError or PreflightRefused if it cannot serve the model."""
    opened: PrefillEngine = _module(options).prefill_engine(source, context, options, hardware)
    return opened


def open_decode(options: EngineOptions, source: str, context: int, hardware: str = "") -> DecodeEngine:
    """As `open_prefill`."""
    opened: DecodeEngine = _module(options).decode_engine(source, context, options, hardware)
    return opened


def _module(options: EngineOptions) -> Any:
    return import_module(options.kind.module)
