"""Ranks of one vLLM on several machines.

The head's vLLM schedules for all ranks; the other nodes have workers only, which send the KV of their own heads, as on
one machine. All nodes are started at the same time and wait for each other. vLLM's messages between them are neither
encrypted nor authenticated: `head_address` belongs to a network of their own.

setup     what each node states to vLLM
parent    the end of a worker whose parent has ended
follower  a node that is not the head: its workers, and a server that is asked for nothing but its health
"""
