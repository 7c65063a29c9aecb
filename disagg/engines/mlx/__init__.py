"""Decode with MLX and mlx-lm.

engine    the DecodeEngine; loop: its thread, which owns the model and every array
groups    the running batch: one mlx-lm BatchGenerator per group of similar length; grouping: who joins which (pure)
batch     one group; sampling: samplers and log-probabilities of a batch
cache     received bytes -> mlx-lm caches
load      checkpoint -> model; prepare: load, patch and check it; patches: what mlx-lm computes differently
profile   what the loaded model computes, measured
warm_up   one request through everything before the first real one
"""
