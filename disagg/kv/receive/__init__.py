"""The receiving end: `KVServer`."""

from disagg.kv.limits import ReceiveLimits
from disagg.kv.receive.server import KVServer

__all__ = ["KVServer", "ReceiveLimits"]
