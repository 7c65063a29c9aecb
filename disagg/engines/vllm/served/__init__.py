"""Prefill with a `vllm serve` that runs beside this server, as a process of its own: asked by HTTP.

engine       the SendingEngine: orders to it, the run of a prompt whose KV is sent, and answers of it
description  what the server is: described inside its processes, checked here before it gets orders
forms        bodies and answers of its HTTP interface; pure
calls        HTTP requests that can be ended at any time
watch        how long a request may be silent, and whether the server answers at all
"""
