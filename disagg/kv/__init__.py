"""The hand-off: how a KV cache is described, framed, sent, received and checked.

Knows bytes, no framework. `layout` and `fingerprint` say what is shipped; `frames` is the wire format;
`send` and `receive` are its two ends; `tickets` decides who may deliver.
"""
