"""Decode with MLX and mlx-lm.

engine    the DecodeEngine; loop: its thread, which owns the model and every array
groups    the running batch: one mlx-lm BatchGenerator per group of similar lengths; grouping: chooses the group (pure)
batch     one group; sampling: samplers and log-probabilities
cache     received bytes -> mlx-lm caches
load      checkpoint -> model; prepare: load, patch and check it; patches: corrections of what mlx-lm computes
profile   measures what the loaded model computes
warm_up   two small requests after loading
"""
