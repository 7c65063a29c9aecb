"""One HTTP server in front of a fleet, for clients that speak the OpenAI API. `disagg serve` runs it.

serve     the process: listen, serve, drain
app       routes; what every request passes through: request id, key, size of the body
keys      the clients' keys, in a file; limits: requests and tokens per minute
request   a request in the gateway's own form; events: what happens to it
dialects  one file per API: body -> request, events -> answer
run       a request's events, from AsyncClient
answer    events -> HTTP, streamed or whole
problems  errors as clients expect them
"""
