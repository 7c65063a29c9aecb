"""Rows of a prefill engine's cache as blocks that a transfer can send, for every engine on PyTorch.

emit      new rows -> KV blocks: views of CPU memory, or copies from a GPU
quantize  KV -> int8 in groups of 64, bit for bit as mx.quantize does
"""
