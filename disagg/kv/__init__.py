"""The hand-off: a KV cache described, framed, sent, received and checked. Bytes only; no framework is imported.

fingerprint          what both hosts must have in common beside the layout of the KV (api/layout.py)
parts                the layers and heads that one of several connections carries
preamble, frames     the bytes on a connection: how it begins, and what follows
channel              a connected socket whose every read and write ends in time
blocks               KV in the memory of the sender: rows of one layer, or its state
transfer             the sending end; outbox: the frames that it has not sent yet; sent: what it took
receive/             the receiving end, which issues the tickets
arena, received      memory to receive into, and what is reserved of it; a complete KV cache in it
"""
