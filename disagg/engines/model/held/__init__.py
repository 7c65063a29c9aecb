"""KV of finished requests, for requests that begin with the same tokens.

store   PrefixCache: what is found, and what is given up
tree    its nodes, by token ids; Rows and Snapshot: what an engine keeps in them
layers  the same by layers, in arrays of any framework
"""

from disagg.engines.model.held.layers import Layer, LayerArrays, LayerSnapshot, last_rows, segments
from disagg.engines.model.held.store import MIN_TOKENS, PinnedPrefix, Prefix, PrefixCache

__all__ = [
    "MIN_TOKENS",
    "Layer",
    "LayerArrays",
    "LayerSnapshot",
    "PinnedPrefix",
    "Prefix",
    "PrefixCache",
    "last_rows",
    "segments",
]
