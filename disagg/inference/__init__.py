"""Runs requests on the servers of a fleet. `Client` and `AsyncClient` are the public API.

client    the public API
stream    an answer while it arrives
several   one prompt to several models
route     which hosts may serve a request
attempts  the retry policy: what to try, in which order
execute   performs the attempts until one gives the answer
http      the servers' HTTP API from the caller's side
measure   a request's figures from its times and its hosts' events
metrics   what those figures are
types     Chunk and Completion
"""
