"""Engines that run no model: they play predicted times and move KV of full size. Answers say that they are simulated.

prefill, decode  the two interfaces
model            what both share: shape, tokenizer, waiting
synthetic_kv     KV of random numbers in both frameworks' memory, for `disagg bench handoff`
"""
