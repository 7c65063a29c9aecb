"""Runs requests on the servers of a fleet. `Client` and `AsyncClient` are the public API.

client    the public API for asyncio; sync_client: for synchronous code; base: what both share
options   the options of a request, and its body
stream    an answer while it arrives
several   one prompt to several models
count     how many tokens a prompt has
hosts/    the client's view of the hosts, and the route of a request
attempts/ the attempts at one request, until one gives the answer
policy    how long requests wait, and how often they are tried
http/     the servers' HTTP API from the caller's side
measure   a request's figures from its times and its hosts' events
metrics   what those figures are
types     Chunk and Completion
"""
