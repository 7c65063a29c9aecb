"""Engines: the only package that imports torch, transformers, vllm or mlx. `base` defines the three
interfaces.

model/         one model, without a framework: checkpoint, tokenizer, profile, preflight
transformers/  EmittingEngine on PyTorch and transformers
vllm/          SendingEngine on vLLM
sending/       what an engine needs whose workers send the KV themselves
staging        rows of a cache as blocks to send, for engines on PyTorch
decoding/      a decode engine's thread and its requests, without a framework
mlx/           DecodeEngine on MLX and mlx-lm
simulated/     EmittingEngine and DecodeEngine without a model: predicted times, and KV of full size
synthetic      KV of full size without a model, in the memory of both frameworks
opening        opens the engine that a host's options name
process        an end of a process without the destructors of its frameworks, and priorities of its threads
"""
