"""The hand-off: how a KV cache is described, framed, sent, received and checked.

Knows bytes, no framework. `layout` and `fingerprint` say what is shipped, `wire` in what form; `blocks` and `received`
are its two forms in memory; `frames` is the wire format; `send` and `receive` are its two ends, `channel` the
connection between them, `assemble` the buffers at its end; `tickets` decides who may deliver.
"""
