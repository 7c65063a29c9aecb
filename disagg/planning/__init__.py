"""The device model: how long a model takes on a machine, by its arithmetic and memory speed. All of it is predicted.

devices     what machines can do: peaks, and the fractions of them that were reached
shapes      what models cost: parameters, FLOPs, bytes of weights
kv          what models cost: bytes of KV
checkpoint  the shape of a model from its config.json
prefill     reading a prompt: seconds, and the time at which each layer's KV exists
decode      generating an answer: seconds per step of a batch
link        sending KV during prefill: the hidden and the exposed part
plan        a hand-off against each machine alone: crossover, link needed, throughput
capacity    all of that for one model on one pair of machines
memory      what a server takes: weights as its engine holds them, KV, workspace
published   checkpoints on the hub whose size is known before a host has them
sizing      which shape and which machine a name in hosts.toml or on the command line means

Pure: no framework, no network, no clock.
"""
