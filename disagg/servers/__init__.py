"""The prefill and decode servers, which run on the hosts.

`python -m disagg.servers --config hosts.toml --host NAME` starts the server of one host.

run       the life of the process: bind, load, serve, drain
monitor   what watches it meanwhile
app       the HTTP application around a service
sse       server-sent events, and requests that end when their caller disconnects
decode/   receives KV and generates
prefill/  computes KV and sends it
output/   from an engine's tokens to the events of an answer: its text, reasoning and calls of tools
host/     what both have in common: how requests begin and end, what they state, whether the engine works
"""
