"""Prefill with vLLM: it schedules prompts by itself, several at once, and its workers send their KV.

engine     the SendingEngine: vLLM in this process; its tensor-parallel workers, if any, in processes of their own
load       options of hosts.toml -> vLLM's arguments, and every reason to refuse them
connector  the KV connector that vLLM loads: orders in, rows and states out
scheduler  its side beside the scheduler: which rows each step adds to which prompt; pure
worker     its side in every worker: rows out of the pages, into shipments
sharding   how the KV is spread over the ranks; pure
pages      rows in vLLM's page tensors, by blocks, and the self-test of how they are read
states     the states of layers in vLLM's pages, and the self-test of how they lie there
sampling   the sampling parameters of a request as vLLM's
profile    what the loaded model computes, measured
nodes      ranks on several machines; follower: one that is not the head
served/    the same with a `vllm serve` that runs beside this server
"""
