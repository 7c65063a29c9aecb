"""A model of hosts: how long a machine would take, from its arithmetic and memory speed. Everything here is predicted.

devices     what machines can do: peaks, and the fractions of them that were reached
shapes      what models cost: parameters, FLOPs, bytes of weights and KV
checkpoint  the shape of a model from its config.json
prefill     reading a prompt: seconds, and the moment at which each layer's KV exists
decode      writing an answer: seconds per step of a batch
link        sending KV while prefill runs: what is hidden and what is exposed
plan        a hand-off against each machine alone: crossover, link wanted, throughput

Pure: no framework, no network, no clock.
"""
