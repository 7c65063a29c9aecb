"""Runs requests on the servers of a fleet. `Client` and `AsyncClient` are the public API.

client    the public API, for asyncio and for synchronous code
several   one prompt to several models
keepers   models of hosts with several: loaded, unloaded, pulled, deleted
stream    an answer while it arrives
attempts/ the attempts at one request, until one gives the answer
options   the options of a request, and its body
types     Chunk and Completion
metrics   a request's figures, from its times and its hosts' events
hosts/    the client's view of the hosts, and the route of a request
http/     the servers' HTTP API from the caller's side
policy    how long requests wait, and how often they are tried
attempt   one way to run a request
"""
