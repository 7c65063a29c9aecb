"""The hand-off: a KV cache described, framed, sent, received and checked. Bytes only; no framework is imported.

layout, fingerprint  the shape of a model's KV, and what else both hosts must have in common
wire                 the forms in which KV crosses the network: as-is or quantised
parts                the layers and heads that one of several connections carries
blocks               KV in the sender's memory: rows of one layer
preamble, frames     the wire format: values to bytes and back
channel, limits      a socket with timeouts; how long each end waits for what
send/, receive/      the two ends of a transfer
tickets, incoming    one-time tickets for transfers; the KV that arrives for one
arena, received      memory to receive into, and what is reserved of it; a complete KV cache in it
"""
