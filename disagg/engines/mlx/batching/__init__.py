"""The running batch.

job       one request and the calls to its listener
batch     one group of requests that decode in one pass, on mlx-lm's BatchGenerator
groups    several of them side by side, and the requests that wait
grouping  which requests decode in one pass; pure
chunk     how many prompt tokens one step computes
memory    what mlx and malloc keep of freed arrays
"""
