"""Prefill with PyTorch and transformers.

engine    chunked prefill that emits each layer's KV as soon as that layer has computed it
runs      one prompt, or one prompt and its answer, computed step by step by the model's forward pass
cache     the transformers Cache whose layers report new rows
layers    its layers, and what is held of them for prompts that begin alike
load      checkpoint -> model on its device; profile: what the loaded model computes, measured
sampling  the next token, for requests that run on the prefill host alone
"""

from __future__ import annotations

from disagg.config import EngineOptions
from disagg.engines.base import PrefillEngine


def prefill_engine(source: str, context: int, options: EngineOptions, hardware: str) -> PrefillEngine:
    """For engines/opening.py."""
    from disagg.engines.transformers.engine import TransformersPrefillEngine

    return TransformersPrefillEngine(source, context, options)
