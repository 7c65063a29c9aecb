"""Faults of the network and of processes, injected at every step of a request, and what must hold afterwards.

flow     pure: where in a stream of bytes a fault strikes, and what it does there
proxy    a TCP proxy that applies faults to the connections through it
process  faults of a server's process: killed, frozen, without memory, disk or descriptors
ptrace   stops one thread of a process
fleet    two prefill and two decode servers of one model with a proxy before every port
cells    the fault matrix as data
matrix   runs its cells; report writes docs/faults.md
kept     hosts with several models: keepers and processes of models, in each state of the model
chaos    many requests while hosts are killed and frozen
soak     many short requests: does memory grow?
turns    a conversation: what does each turn ship?
mixed    short requests beside a long one
fuzz     random bytes to the KV receiver
bodies   random bodies of HTTP requests

`python -m tests.faults` runs the long ones; `make test` runs cells that stand for the matrix.
"""
