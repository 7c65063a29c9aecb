"""The decode engine without a framework: KV and the last token -> stream of tokens.

engine    DecodeEngine: the thread that runs commands, steps the batch and calls listeners
valid     which requests it can compute
batch     Job: a request in it; Batch and Backend: what a framework gives it
tail      the layers of a split that it computes itself, and when
commands  what other threads want done on that thread
"""

from disagg.engines.decoding.batch import Backend, Batch, Caches, Job
from disagg.engines.decoding.engine import DecodeBounds, DecodeEngine

__all__ = ["Backend", "Batch", "Caches", "DecodeBounds", "DecodeEngine", "Job"]
