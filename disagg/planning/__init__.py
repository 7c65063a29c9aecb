"""The device model: how long a model takes on a machine, by its arithmetic and memory speed. All of it is predicted.

devices     what machines can do: peaks, and the fractions of them that were reached
shapes      what models cost: parameters, FLOPs, bytes of weights
checkpoint  a model's size, KV and form of weights by its config.json
sizing      which size and which machine a name or source means; checkpoints whose size is known before a host has them
times       reading a prompt, sending its KV meanwhile, writing the answer: seconds
split       a prompt that both machines compute: seconds, and the least that it could take
capacity    a hand-off against each machine alone, for one model on one pair of machines
verdicts    whether a model can be handed over, by its config.json
refusals    the rules by which it is refused there, and when it is loaded
memory      what a server takes: weights as its engine holds them, KV, workspace

Pure: no framework, no network, no clock.
"""
