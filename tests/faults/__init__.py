"""Faults of the network and of processes, injected at every step of a request, and what must hold afterwards.

flow     pure: where in a stream of bytes a fault strikes, and what it does there
proxy    a TCP proxy that applies faults to the connections through it
process  faults of a server's process: killed, frozen, without memory, disk or descriptors
fleet    two prefill and two decode servers of one model with a proxy before every port
"""
