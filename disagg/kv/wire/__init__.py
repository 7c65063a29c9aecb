"""The bytes on a KV connection, and the socket that carries them.

preamble  version and ticket: the fixed-size first bytes
proof     each end's proof that it has the ticket
frames    values to bytes and back, no sockets
channel   a connected socket whose every read and write ends in time
"""
