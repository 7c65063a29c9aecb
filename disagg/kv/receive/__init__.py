"""The receiving end: `KVServer`, and the tickets that let a transfer in (expected.py, tickets.py, incoming.py)."""

from disagg.kv.limits import ReceiveLimits
from disagg.kv.receive.server import KVServer

__all__ = ["KVServer", "ReceiveLimits"]
