"""The receiving end of transfers.

server     listens; gives a connection whose ticket is proven a thread of its own
newcomers  connections that have not proven a ticket
tickets    one-time tickets, and how each ends
incoming   the transfer that a ticket allows, and which of its parts have come
part       one connection with a valid ticket, from its header to its acknowledgement
assembly   the frames of a part, each in its place; chunked: the same chunk by chunk
chunks     the memory that a chunk has for itself, and when all of it has come
credits    what a sender of hidden states is told while it sends
pace       how long all of them wait, and when a sender is given up
"""

from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.server import KVServer

__all__ = ["KVServer", "ReceiveLimits"]
