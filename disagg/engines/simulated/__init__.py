"""Engines that run no model: they wait for predicted times and move KV of full size. Answers are marked as simulated.

prefill, decode  the two interfaces
model            shared by both: the model's sizes, a byte tokenizer, held KV that is counted and not stored, waiting
"""
