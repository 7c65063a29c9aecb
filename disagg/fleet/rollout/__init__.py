"""Rollouts: a new release, host by host, back to the one before at the first host that fails.

policy    the hosts' states and the settings -> the next steps; pure
gate      the test that a host passes before the next one is restarted: its answer to a fixed prompt
record    what outlasts an interruption, and each host's phase from it and from the host's links
rollout   carries the steps out; report: how it ended
"""
