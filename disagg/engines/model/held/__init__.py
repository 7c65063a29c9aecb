"""KV of finished requests, for requests that begin with the same tokens.

store   HeldStore: what is found, and what is given up
tree    its nodes, by token ids; Rows and Snapshot: what an engine keeps in them
"""

from disagg.engines.model.held.store import MIN_TOKENS, Held, HeldStore, Prefix

__all__ = ["MIN_TOKENS", "Held", "HeldStore", "Prefix"]
