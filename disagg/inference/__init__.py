"""Runs requests on the servers of a fleet. `Client` and `AsyncClient` are the public API.

client    the public API
stream    an answer while it arrives
several   one prompt to several models
hosts/    what the client knows of the hosts, and the route of a request
policy    how long requests wait, and how often they are tried
attempts  the retry policy: what to try, in which order
execute   performs the attempts until the answer is complete
waiting   waits for hosts that are busy or not up
perform   one attempt: a hand-off, or the whole request on one host
answer    an answer from its first to its last token, from one host or several
http/     the servers' HTTP API from the caller's side
measure   a request's figures from its times and its hosts' events
metrics   what those figures are
types     Chunk and Completion
"""
