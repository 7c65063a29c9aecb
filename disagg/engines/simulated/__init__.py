"""Engines that run no model: they wait for predicted times and move KV of full size. Answers are marked as simulated.

prefill, decode  the two interfaces
model            shared by both: the model's sizes, a byte tokenizer, held KV that is counted and not stored, waiting
"""

from __future__ import annotations

from disagg.config import EngineOptions
from disagg.engines.base import DecodeEngine, PrefillEngine


def prefill_engine(source: str, context: int, options: EngineOptions, hardware: str) -> PrefillEngine:
    """For engines/opening.py."""
    from disagg.engines.simulated.prefill import SimulatedPrefillEngine

    return SimulatedPrefillEngine(source, context, options, hardware)


def decode_engine(source: str, context: int, options: EngineOptions, hardware: str) -> DecodeEngine:
    """For engines/opening.py."""
    from disagg.engines.simulated.decode import SimulatedDecodeEngine

    return SimulatedDecodeEngine(source, context, options, hardware)
