"""Decode and prefill with MLX and mlx-lm.

engine        the DecodeEngine: the thread of `decoding` with this model
groups        the running batch: groups of requests with similar lengths; batch: one of them; passes: who joins which
prefix_cache  rows and snapshots of mlx-lm's caches, held for requests that begin alike
sampling      the next token from logits, and log-probabilities; scores: those of a prompt
cache         received bytes -> mlx-lm caches; audit: computes some of received KV again and compares
memory        what KV is received into, and what is kept of freed arrays
span          some layers of the model, computed without the others: heads and tails of splits
prefill       the EmittingEngine; emit: new rows as blocks to send
load          checkpoint -> model, patched and checked
profile       measures what the loaded model computes
"""
