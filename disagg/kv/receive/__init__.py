"""The receiving end of transfers.

server     listens; gives a connection whose ticket is proven a thread of its own
newcomers  connections that have not proven a ticket
tickets    one-time tickets, and how each ends
incoming   the transfer that a ticket allows, and which of its parts have come
part       one connection with a valid ticket, from its header to its acknowledgement; what its sender is told meanwhile
assembly   the frames of a part, each in its place
chunks     the same chunk by chunk, and the memory that a chunk has for itself
pace       how long all of them wait, and when a sender is given up
"""

from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.server import KVServer

__all__ = ["KVServer", "ReceiveLimits"]
