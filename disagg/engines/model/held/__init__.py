"""KV of finished requests, for requests that begin with the same tokens.

store   HeldStore: what is found, and what is given up
tree    its nodes, by token ids; Rows and Snapshot: what an engine keeps in them
layers  the same by layers, in arrays of any framework
"""

from disagg.engines.model.held.layers import Layer, LayerArrays, LayerSnapshot, last_rows, segments
from disagg.engines.model.held.store import MIN_TOKENS, Held, HeldStore, Prefix

__all__ = [
    "MIN_TOKENS",
    "Held",
    "HeldStore",
    "Layer",
    "LayerArrays",
    "LayerSnapshot",
    "Prefix",
    "last_rows",
    "segments",
]
