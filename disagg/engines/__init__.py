"""Engines: the only package that imports torch, transformers or mlx. `base` defines the two interfaces.

model/         one model, without a framework: checkpoint, tokenizer, profile, preflight
transformers/  PrefillEngine on PyTorch and transformers
vllm/          SendingEngine on vLLM
staging/       rows of a cache as blocks to send, for engines on PyTorch
mlx/           DecodeEngine on MLX and mlx-lm
simulated/     both interfaces without a model: predicted times, and KV of full size
exit           ends a process that has used mlx
"""
