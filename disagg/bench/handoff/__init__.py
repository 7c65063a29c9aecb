"""A hand-off of random KV, compared with other ways to move the same bytes: for `disagg bench handoff`.

Two processes, on two machines or on one, which `disagg.api.handoff` describes.

run          the rounds: every transport in turn, timed
transport    the interface of a transport; handoff, bare_socket, http_json: the three
channel      typed messages between the two ends
connect      TCP connections that begin with a secret key
"""
