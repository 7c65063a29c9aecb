"""Engines that run no model: they wait for predicted times and move KV of full size. Answers are marked as simulated.

prefill, decode  the two interfaces
model            shared by both: the model's sizes, a byte tokenizer, waiting
held             held KV: counted, not stored
synthetic_kv     random KV in both frameworks' memory, for `disagg bench handoff`
"""
