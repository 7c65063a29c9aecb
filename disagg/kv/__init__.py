"""The hand-off: a KV cache described, framed, sent, received and checked. Bytes only; no framework is imported.

fingerprint          what both hosts must have in common beside the layout of the KV (api/layout.py)
parts                the layers and heads that one of several connections carries
preamble, frames     the bytes on a connection: how it begins, and what follows
channel              a connected socket whose every read and write ends in time
blocks               what is sent, in the sender's memory: rows of one layer, its state, hidden states, a chunk's end
transfer             the sending end; outbox: the frames that it has not sent yet; sent: what it took
receive/             the receiving end, which issues the tickets
arena, received      memory to receive into, and what is reserved of it; a KV cache in it
arriving             KV that is used while it arrives, chunk by chunk
"""
