"""The decode engine without a framework: a thread, its requests, and what a framework gives it.

engine    BatchingEngine: the thread that runs commands, steps the batch and calls listeners
batch     Job: a request in it; Batch and Backend: what a framework gives it
commands  what other threads want done on that thread
"""

from disagg.engines.decoding.batch import Backend, Batch, Caches, Job
from disagg.engines.decoding.engine import BatchingEngine

__all__ = ["Backend", "Batch", "BatchingEngine", "Caches", "Job"]
