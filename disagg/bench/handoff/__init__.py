"""A hand-off of random KV, compared with other ways to move the same bytes: for `disagg bench handoff`.

Two processes, on two machines or on one, which `disagg.api.handoff` describes.

run          the rounds: every transport in turn, timed
transports   the three transports, and their interface
channel      typed messages between the two ends
"""
