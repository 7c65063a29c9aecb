"""Engines: the only room that imports torch, transformers or mlx. `base` states the two interfaces.

model/         one model, without a framework: checkpoint, tokenizer, profile, preflight
transformers/  PrefillEngine on PyTorch and transformers
mlx/           DecodeEngine on MLX and mlx-lm
simulated/     both interfaces without a model: they play predicted times, with KV of full size
exit           how a process that has used mlx ends
"""
