"""The hand-off: a KV cache described, framed, sent, received and checked. Bytes only; no framework is imported.

layout, fingerprint  the shape of a model's KV, and what else both hosts must have in common
wire                 the forms in which KV crosses the network: as-is or quantised
blocks               KV in the sender's memory: rows of one layer
frames               the wire format: values to bytes and back
channel              a socket with timeouts; send and receive: the two ends of a transfer
outbox, sent         the blocks that wait to be sent; what a finished transfer took
tickets              one-time tickets for transfers, and the budget of received KV
arena                memory to receive into; assemble: the place of each frame in it
received             a complete KV cache in the receiver's memory
"""
