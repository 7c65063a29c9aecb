"""Engines: the only package that imports torch, transformers, vllm or mlx. `base` defines the interfaces of prefill
engines, `decoding` that of decode engines.

model/         one model, without a framework: checkpoint, tokenizer, profile, preflight
transformers/  EmittingEngine on PyTorch and transformers
vllm/          SendingEngine on vLLM
sending/       what an engine needs whose workers send the KV themselves
staging        rows of a cache as blocks to send, for engines on PyTorch
decoding/      DecodeEngine without its framework: its thread and its requests
mlx/           DecodeEngine on MLX and mlx-lm
simulated/     EmittingEngine and DecodeEngine without a model: predicted times, and KV of full size
synthetic      KV of full size without a model, in the memory of both frameworks
opening        opens the engine that a host's options name
process        an end of a process without the destructors of its frameworks, and priorities of its threads
"""
