"""Prefill with PyTorch and transformers.

engine    chunked prefill that emits each layer's KV as soon as that layer has computed it
runs      one prompt, or one prompt and its answer, computed step by step by the model's forward pass
cache     the transformers Cache whose layers report new rows
layers    its layers, and what is held of them for prompts that begin alike
load      checkpoint -> model on its device; profile: what the loaded model computes, measured
sampling  the next token, for requests that run on the prefill host alone
"""
