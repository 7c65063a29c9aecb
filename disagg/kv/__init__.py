"""The hand-off: a KV cache described, framed, sent, received and checked. Bytes only; no framework is imported.

layout, fingerprint  the shape of a model's KV, and what else both hosts must have in common
forms                the forms in which KV crosses the network: as-is or quantised
parts                the layers and heads that one of several connections carries
blocks               KV in the sender's memory: rows of one layer
wire/                the bytes on a connection, and a socket with timeouts
limits               how long each end waits for what
send/, receive/      the two ends of a transfer; the receiver issues the tickets
arena, received      memory to receive into, and what is reserved of it; a complete KV cache in it
"""
